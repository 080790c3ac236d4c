"""Flight Recorder traces of live trainers: used where SCOUT does not see the operations itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from scout_core.decision.merging import merge, share_members
from scout_core.decision.snapshots import RankSnapshot
from scout_core.errors import ScoutError
from scout_core.evidence.dump_assembly import assemble
from scout_core.evidence.dump_format import parse_dump
from scout_core.evidence.flight_recorder import read_live

TRACE_S: Final = 0.3
"""A trainer that is not stopped answers in milliseconds, also while its GIL is kept."""


def trace_of(socket_path: str) -> dict[str, Any] | None:
    """Return what a trainer's worker server says; None when it does not answer."""
    try:
        return read_live(socket_path, timeout_s=TRACE_S)
    except ScoutError:
        return None  # it is stopped or gone, which triage tells


def with_traces(
    snapshots: Sequence[RankSnapshot], traces: Mapping[int, dict[str, Any]]
) -> list[RankSnapshot]:
    """Add what the traces say about groups and operations to the snapshots of their ranks.

    Raises:
        ScoutError: a trace is of a form that this version does not read.
    """
    if not traces:
        return list(snapshots)
    dumps = {rank: parse_dump(trace, f"trace of rank {rank}") for rank, trace in traces.items()}
    recorded = {snapshot.rank: snapshot for snapshot in assemble(dumps)}
    return share_members(merge([s, recorded[s.rank]]) if s.rank in traces else s for s in snapshots)
