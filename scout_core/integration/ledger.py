"""Incidents of a run: each fault is reported once, and cleared when it is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import xxhash

from scout_core.decision.incident import Incident, Kind
from scout_core.report.events import now

Key = tuple[str, tuple[int, ...], tuple[int, ...], bool]


class Ledger:
    """Keeps incidents; a fault is known by its kind, its culprits and, unnamed, its peer group.

    One that names the rows of an expert at which it shows says more than one that does not, so it
    is reported too; the other way round it is not.
    """

    def __init__(self, on_incident: Callable[[Incident], Incident]) -> None:
        """Start empty; `on_incident` is called once per fault, on every rank, and may add to it."""
        self._on_incident = on_incident
        self._all: list[Incident] = []
        self._open: dict[Key, str] = {}

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, oldest first."""
        return list(self._all)

    @property
    def open(self) -> frozenset[Key]:
        """Faults that were reported and have not been seen healthy since."""
        return frozenset(self._open)

    def slow_ranks(self, shown_by_other_than: str) -> frozenset[int]:
        """Ranks named by open stragglers, but for those that one thing showed."""
        return frozenset(
            rank
            for (kind, ranks, *_), by in self._open.items()
            if kind == Kind.STRAGGLER.value and by != shown_by_other_than
            for rank in ranks
        )

    def record(self, incident: Incident, shown_by: str) -> bool:
        """Report a fault unless it is already open; tell whether it was new.

        Args:
            shown_by: what showed it; only a later healthy look at the same thing clears it.
        """
        key = _key(incident)
        if key in self._open or (*key[:3], True) in self._open:
            return False
        self._open[key] = shown_by
        self._all.append(self._on_incident(incident))
        return True

    def clear(self, looked_at: frozenset[str], still: Iterable[Incident]) -> list[Key]:
        """Close and return the faults that one of these things showed before and not now."""
        kept = {_key(incident) for incident in still}
        gone = [key for key, by in self._open.items() if by in looked_at and key not in kept]
        for key in gone:
            del self._open[key]
        return gone


def _key(incident: Incident) -> Key:
    culprits = incident.culprit_ranks
    group = () if culprits else incident.peer_group
    # Each cause of an imbalance is a fault of its own; an outlier is one fault however it shows.
    kind = incident.reason if incident.kind is Kind.IMBALANCE else incident.kind.value
    return kind, culprits, group, "rows" in incident.evidence


def stamped(incident: Incident, job: str, time: str = "") -> Incident:
    """Add job, time (now, if none is given) and identity; the same for all ranks that report it."""
    modules = sorted({culprit.module for culprit in incident.culprits})
    parts = (job, incident.step, *_key(incident)[:3], incident.reason, modules)
    identity = xxhash.xxh3_64_hexdigest(repr(parts).encode())[:12]
    return replace(incident, job=job, time=time or now(), id=identity)
