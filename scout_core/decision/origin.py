"""Where a wrong result began, when ranks exchange data inside the replayed module.

Tensor, context and expert parallel ranks pass each other partial results: one faulty rank makes its
partners wrong too, and each of them is an outlier among its own peers. A trace lists signatures at
the edges of a module's submodules in program order, which is the same on all partners. The rank
whose trace leaves its peers' first is where the fault began, provided that it computed that value
itself; ranks that leave later, or that received the value, are victims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scout_core.decision import consensus
from scout_core.decision.consensus import Status
from scout_core.decision.replay_verdict import Finding
from scout_core.decision.topology import LayoutName

SPREADS = frozenset({"SDC_REPLAY_OUTPUT", "SDC_REPLAY_INPUT_GRAD", "SDC_REPLAY_PARAMETER_GRAD"})
"""Reasons of findings whose cause may lie on another rank that shares the module's collectives."""


class Event(NamedTuple):
    """One value at the edge of a submodule, on one rank."""

    place: str
    """Submodule and edge, as in "attention.wo out"."""
    computed: bool
    """By this rank itself since its last event; False when a collective may have brought it."""
    layout: LayoutName
    """Whose peers hold the same value: the experts' own values are equal among expert peers."""
    value: int


Trace = tuple[Event, ...]
PeersOf = Callable[[int, LayoutName], Sequence[int]]


@dataclass(frozen=True)
class Departure:
    """The first event at which a rank differs from the majority of its peers."""

    index: int
    event: Event


def departure(rank: int, traces: Mapping[int, Trace], peers_of: PeersOf) -> Departure | None:
    """Find where a rank's trace leaves its peers'; None when it does not, or nobody can tell.

    Events are matched by place and occurrence: gradients of one tensor that passes several edges
    have no order among themselves.
    """
    layouts: tuple[LayoutName, ...] = ("dense", "expert")
    compared = {peer for layout in layouts for peer in peers_of(rank, layout)}
    values = {peer: _values(traces.get(peer, ())) for peer in compared}
    for index, (event, key) in enumerate(_keyed(traces.get(rank, ()))):
        peers = peers_of(rank, event.layout)
        others = [values[peer].get(key) for peer in peers]
        if None in others:
            return None  # the peers ran other code: nothing to compare from here on
        verdict = consensus.exact(others)
        if verdict.status is Status.ATTRIBUTED and peers.index(rank) in verdict.outliers:
            return Departure(index, event)
    return None


def _values(trace: Trace) -> dict[tuple[str, int], int]:
    return {key: event.value for event, key in _keyed(trace)}


def _keyed(trace: Trace) -> Iterator[tuple[Event, tuple[str, int]]]:
    """Yield each event with its place and the number of earlier events there."""
    seen: Counter[str] = Counter()
    for event in trace:
        yield event, (event.place, seen[event.place])
        seen[event.place] += 1


def origins(
    row: Sequence[int], accused: frozenset[int], traces: Mapping[int, Trace], peers_of: PeersOf
) -> dict[int, str]:
    """Find the rank of a row at which its fault began.

    Args:
        row: ranks that share the module's collectives.
        accused: ranks that are outliers among their peers, job-wide.

    Returns:
        The one rank that is the origin, with the place of the first wrong value; empty when the
        row has no accused rank, or its origin cannot be told.
    """
    suspects = accused & set(row)
    if not suspects:
        return {}
    left = {rank: departure(rank, traces, peers_of) for rank in row}
    seen = {rank: found for rank, found in left.items() if found is not None}
    if not seen:  # nothing that partners exchange was wrong: a fault of its own stays with it
        return dict.fromkeys(suspects, "") if len(suspects) == 1 else {}
    earliest = min(found.index for found in seen.values())
    first = [rank for rank, found in seen.items() if found.index == earliest]
    if len(first) == 1 and seen[first[0]].event.computed:
        return {first[0]: seen[first[0]].event.place}
    return {}


@dataclass(frozen=True)
class Origins:
    """Where the faults of one check began, job-wide."""

    rows: Mapping[int, tuple[int, ...]]
    """For each rank, the ranks that share its module's collectives, itself included."""
    places: Mapping[int, str]
    """Ranks at which a fault began, and the place of the first wrong value ("" when no value that
    is exchanged was wrong)."""
    blamed: frozenset[int] = frozenset()
    """Ranks that some finding names already, job-wide."""

    @classmethod
    def find(
        cls,
        accused: frozenset[int],
        traces: Mapping[int, Trace],
        rows: Sequence[tuple[int, ...]],
        peers_of: PeersOf,
        blamed: frozenset[int] = frozenset(),
    ) -> Origins:
        """Look at every row.

        Args:
            accused: ranks that are outliers among their peers, job-wide.
            blamed: ranks that some finding names, these and those of memory.
        """
        places: dict[int, str] = {}
        for row in rows:
            places |= origins(row, accused, traces, peers_of)
        return cls({rank: row for row in rows for rank in row}, places, blamed | accused)

    def settle(self, finding: Finding) -> Finding | None:
        """Keep only the ranks at which a fault began; None when all of them are victims.

        A rank whose wrong values only reached others has no finding of its own: it takes the place
        of its victims here. When the origin of a rank's row cannot be told, nobody is named, and
        the finding says which ranks it may be.
        """
        if finding.reason not in SPREADS or not finding.ranks:
            return finding
        named = tuple(sorted(self._culprits(finding)))
        if named:
            places = sorted({self.places[rank] for rank in named} - {""})
            where = f", first wrong at {', '.join(places)}" if places else ""
            return replace(finding, ranks=named, what=f"{finding.what}{where}")
        unclear = [rank for rank in finding.ranks if not self.places.keys() & set(self.rows[rank])]
        if not unclear:
            return None
        suspects = sorted({partner for rank in unclear for partner in self.rows[rank]})
        why = (
            f"ranks {suspects} exchange data inside this module, and the first wrong value was "
            "not computed by one of them alone"
        )
        return replace(finding, ranks=(), why=why)

    def _culprits(self, finding: Finding) -> set[int]:
        began = {rank for rank in finding.ranks if rank in self.places}
        partners = {partner for rank in finding.ranks for partner in self.rows[rank]}
        return began | ((partners & self.places.keys()) - self.blamed)
