"""Incidents of a run: each fault is reported once, and cleared when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import xxhash

from scout_core.decision.incident import Incident
from scout_core.report.events import now

Key = tuple[str, tuple[int, ...], tuple[int, ...]]


class Ledger:
    """Keeps incidents; a fault is known by its kind, its culprits and, unnamed, its peer group."""

    def __init__(self, job: str, on_incident: Callable[[Incident], None]) -> None:
        """Start empty; `on_incident` is called once per fault, on every rank."""
        self._job = job
        self._on_incident = on_incident
        self._all: list[Incident] = []
        self._open: dict[Key, str] = {}

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, oldest first."""
        return list(self._all)

    def record(self, incident: Incident, recipe: str) -> bool:
        """Report a fault unless it is already open; tell whether it was new.

        Args:
            recipe: what showed it; a later clean check of the same recipe clears it.
        """
        key = _key(incident)
        if key in self._open:
            return False
        self._open[key] = recipe
        complete = replace(incident, job=self._job, time=now(), id=_id(self._job, incident))
        self._all.append(complete)
        self._on_incident(complete)
        return True

    def clear(self, recipe: str, still: list[Incident]) -> list[Key]:
        """Close the faults that this recipe showed before and does not show now."""
        kept = {_key(incident) for incident in still}
        gone = [
            key for key, shown_by in self._open.items() if shown_by == recipe and key not in kept
        ]
        for key in gone:
            del self._open[key]
        return gone


def _key(incident: Incident) -> Key:
    culprits = incident.culprit_ranks
    return incident.kind.value, culprits, () if culprits else incident.peer_group


def _id(job: str, incident: Incident) -> str:
    """The same on every rank: a digest of what was found, where and when."""
    modules = sorted({culprit.module for culprit in incident.culprits})
    parts = (job, incident.step, *_key(incident), incident.reason, modules)
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())[:12]
