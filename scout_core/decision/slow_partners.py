"""Who is slow, when ranks wait for each other inside the replayed module.

Tensor, context and expert parallel partners meet in the middle of a layer, so the time of each
holds what it waits for the others: one slow rank makes its whole row slow among their peers. The
slowest of a row is the culprit if it stands out from the row; if it does not, nobody is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, Incident, Kind, name_ranks

STANDS_OUT = 2.0
"""How many times the extra time of its slowest partner, both against their peers, a culprit has."""


def settle(
    incidents: Iterable[Incident], factors: Mapping[int, float], rows: Sequence[tuple[int, ...]]
) -> tuple[Incident, ...]:
    """Keep the culprits that stand out from their row; incidents of other kinds are left alone.

    Args:
        incidents: of one check, job-wide.
        factors: how many times its peers' time each global rank took; of all work groups.
        rows: groups of ranks that exchange data inside a layer.
    """
    row_of = {rank: row for row in rows for rank in row}
    settled: dict[tuple[object, ...], Incident] = {}
    for incident in incidents:
        for each in _settled(incident, factors, row_of):
            settled.setdefault((each.kind, each.reason, each.culprits, each.peer_group), each)
    return tuple(settled.values())


def _settled(
    incident: Incident, factors: Mapping[int, float], row_of: Mapping[int, tuple[int, ...]]
) -> Iterable[Incident]:
    if incident.kind is not Kind.STRAGGLER:
        yield incident
        return
    kept = []
    for culprit in incident.culprits:
        row = row_of.get(culprit.rank, (culprit.rank,))
        extra = {rank: factors.get(rank, 1.0) - 1.0 for rank in row}
        mine = extra.pop(culprit.rank)
        others = max([0.0, *extra.values()])
        if mine > STANDS_OUT * others:
            kept.append(culprit)
        elif others <= STANDS_OUT * mine:
            yield _of_row(incident, row)
    if kept:
        now = tuple(kept)
        message = incident.message.replace(name_ranks(incident.culprits), name_ranks(now), 1)
        yield replace(incident, culprits=now, message=message)


def _of_row(incident: Incident, row: tuple[int, ...]) -> Incident:
    place = incident.evidence.get("site", "a layer")
    return replace(
        incident,
        status=Status.INCONCLUSIVE,
        culprits=(),
        peer_group=row,
        action=Action.DIAGNOSE_HARDWARE,
        message=(
            f"ranks {list(row)} wait for each other inside of {place} and are slower there than "
            f"their peers (step {incident.step}); one of them is at fault, this does not say "
            "which; compare their clocks and thermals; the latest checkpoint can be kept"
        ),
    )
