"""What a hub concludes from snapshots, and how it is told: files of the run, and one sentence."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any, Final

from scout_core.decision.consensus import Status
from scout_core.decision.hang import HangDiagnosis, HangKind, diagnose, to_incident
from scout_core.decision.incident import Incident, Kind
from scout_core.decision.snapshot_json import to_json
from scout_core.decision.snapshots import Operation, OperationState, ProcessState, RankSnapshot
from scout_core.decision.topology import Topology
from scout_core.observer.wire import Message
from scout_core.report.events import RunDir, now

OBSERVER: Final = -1
"""Rank of events that no trainer emits."""
ASKED_TO_END: Final = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes of processes that somebody asked to end."""
TOGETHER_S: Final = 0.1
"""Processes that are asked to end together do so within this time of one another."""

_JUDGED_BY_LIMITS: Final = frozenset(
    {
        HangKind.PROCESS_DEAD,
        HangKind.NODE_UNREACHABLE,
        HangKind.PROCESS_STOPPED,
        HangKind.NEVER_ARRIVED,
        HangKind.INPUT_STALL,
        HangKind.CHECKPOINT_STALL,
    }
)
"""Kinds that no time can undo, or of which `diagnose` excuses ranks that are within their limit."""


class Reporter:
    """Keeps the one open incident: reported once, withdrawn when the job goes on."""

    def __init__(self, run_dir: RunDir, topology: Topology | None, job: str) -> None:
        self._run_dir = run_dir
        self._topology = topology
        self._job = job
        self._open: Incident | None = None
        self._opened_s = 0.0
        self._emitted: set[str] = set()
        self._files = 0

    def judge(self, snapshots: Sequence[RankSnapshot], now_s: float) -> str:
        """Report a hang that is new; returns the sentence for the console, or "" for nothing."""
        if _was_ended_on_request(snapshots):
            self.event_once("job_terminated", ranks=len(snapshots))
            return ""
        diagnosis = diagnose(snapshots)
        if diagnosis.kind is HangKind.NONE or not _has_lasted(diagnosis, snapshots):
            return ""
        incident = to_incident(diagnosis, topology=self._topology, job=self._job, time=now())
        if self._open is not None and not _adds_to(incident, self._open):
            return ""
        self._open, self._opened_s = incident, now_s
        self._keep(snapshots)
        self._run_dir.report(incident)
        return f"scout: {incident.message} [{incident.id}]"

    def withdraw(self, now_s: float) -> None:
        """Clear an incident because the job goes on; a dead process does not come back."""
        incident = self._open
        if incident is None or incident.kind is Kind.PROCESS_DEAD:
            return
        self._open = None
        after_s = round(now_s - self._opened_s, 3)
        self._emit("incident_cleared", incident.step, incident=incident.id, after_s=after_s)

    def event_once(self, event: str, **fields: Any) -> None:
        """Emit an event the first time it happens with these fields."""
        key = json.dumps([event, fields], sort_keys=True)
        if key not in self._emitted:
            self._emitted.add(key)
            self._emit(event, **fields)

    def status(self, snapshots: Sequence[RankSnapshot]) -> Message:
        """Return the state of the job for `scout status`."""
        opened = None if self._open is None else self._open.to_json()
        rows = [self._row(snapshot) for snapshot in snapshots]
        return {"t": "status", "ranks": rows, "incident": opened}

    def _row(self, snapshot: RankSnapshot) -> dict[str, Any]:
        pending = max(_outstanding(snapshot), key=lambda o: o[1].age_s or 0.0, default=None)
        known = self._topology is not None and snapshot.rank < self._topology.world_size
        return {
            "rank": snapshot.rank,
            "host": snapshot.host,
            "coordinate": self._topology.dense[snapshot.rank]._asdict()
            if known and self._topology is not None
            else None,
            "state": snapshot.state.value,
            "phase": snapshot.phase.value,
            "step": snapshot.progress.step if snapshot.progress else None,
            "silent_s": snapshot.phase_age_s,
            "late": not snapshot.within_limit,
            "pending": None if pending is None else _pending(*pending),
            "missing": snapshot.missing,
        }

    def _emit(self, event: str, step: int = -1, **fields: Any) -> None:
        self._run_dir.emit(event, rank=OBSERVER, step=step, **fields)

    def _keep(self, snapshots: Sequence[RankSnapshot]) -> None:
        """Leave the evidence for `scout postmortem`; a full disk must not stop the report."""
        self._files += 1
        path = self._run_dir.path / f"rank_snapshots-{self._files}.jsonl"
        lines = "".join(json.dumps(to_json(snapshot)) + "\n" for snapshot in snapshots)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(lines)
        except OSError as error:
            self._emit("snapshots_not_written", path=str(path), reason=str(error))


def _has_lasted(diagnosis: HangDiagnosis, snapshots: Sequence[RankSnapshot]) -> bool:
    """Tell whether what looks like a hang has lasted for as long as it may.

    Snapshots of a job that moves show operations that some members have finished and others have
    not; time tells them from a hang, the number of looks does not.
    """
    late = {s.rank for s in snapshots if not s.within_limit and not s.missing}
    if diagnosis.kind in _JUDGED_BY_LIMITS:
        return True
    if diagnosis.kind is HangKind.GPU_STUCK:
        return late.issuperset(diagnosis.culprits)
    missing = {s.rank for s in snapshots if s.missing}
    return bool(late) and late.issuperset(set(diagnosis.involved) - missing)


def _adds_to(found: Incident, known: Incident) -> bool:
    """A verdict is reported again only when it names somebody where evidence was missing.

    Not when processes die later: what stands still long enough is killed by a watchdog.
    """
    return (
        known.reason == "HANG_EVIDENCE_MISSING"
        and found.status is Status.ATTRIBUTED
        and found.kind is not Kind.PROCESS_DEAD
    )


def _was_ended_on_request(snapshots: Sequence[RankSnapshot]) -> bool:
    """All of the job was asked to end: nobody is at fault."""
    dead = [s for s in snapshots if s.state is ProcessState.DEAD]
    gone = (ProcessState.DEAD, ProcessState.EXITED)
    return were_asked_to_end(dead) and all(s.state in gone for s in snapshots)


def were_asked_to_end(dead: Sequence[RankSnapshot]) -> bool:
    """Tell whether somebody asked the dead processes to end.

    An exit code is lost when the parent collects it before we look. Such a process counts as one
    of them, unless it died before the others: then the launcher may have ended them for its sake.
    """
    asked = [s for s in dead if s.exit_code in ASKED_TO_END]
    unknown = [s for s in dead if s.exit_code is None]
    if not asked or len(asked) + len(unknown) < len(dead):
        return False
    first_s = max(s.state_age_s or 0.0 for s in asked)
    return all((s.state_age_s or 0.0) <= first_s + TOGETHER_S for s in unknown)


def _outstanding(snapshot: RankSnapshot) -> Iterator[tuple[str, Operation]]:
    places = [(g.name, g.operations) for g in snapshot.groups]
    places += [(f"{c.group} with {c.peer}", c.operations) for c in snapshot.channels]
    for name, operations in places:
        for operation in operations:
            if operation.state is not OperationState.COMPLETED:
                yield name, operation


def _pending(group: str, operation: Operation) -> dict[str, Any]:
    return {
        "operation": operation.name,
        "group": group,
        "sequence": operation.sequence,
        "age_s": operation.age_s,
        "call_site": operation.call_site,
    }
