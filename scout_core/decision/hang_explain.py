"""Turns the conclusions of the hang verdict into findings and sentences."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from scout_core.decision.consensus import exact
from scout_core.decision.deadlock import Core
from scout_core.decision.divergence import Camp, Divergence, describe
from scout_core.decision.evidence import Fingerprint, Missing
from scout_core.decision.hang_diagnosis import Finding, HangDiagnosis, HangKind
from scout_core.decision.snapshots import Operation, Phase, ProcessState, RankSnapshot
from scout_core.decision.views import GroupView, PairView
from scout_core.decision.waits import Wait, WaitGraph, WaitKind

SHOWN = 8
"""Ranks, waits or camps that one sentence or one list of evidence shows at most."""


class Explainer:
    """Says why each culprit is one, and what the job as a whole waits for."""

    def __init__(
        self,
        seen: Mapping[int, RankSnapshot],
        groups: Sequence[GroupView],
        graph: WaitGraph,
        stuck: Mapping[int, tuple[GroupView, Operation]],
        divergences: Sequence[Divergence],
    ) -> None:
        self._seen, self._groups, self._graph = seen, groups, graph
        self._stuck, self._divergences = stuck, divergences
        self._missed: dict[int, list[Wait]] = {}

    def diagnosis(
        self,
        *,
        kind: HangKind,
        kinds: Mapping[int, HangKind],
        victims: Sequence[int],
        cores: Sequence[Core],
        unseen: Sequence[int],
    ) -> HangDiagnosis:
        """Put the verdict together; `kinds` are the culprits, in rank order."""
        self._missed = self._missed_by(set(kinds))
        findings = tuple(self._finding(rank, kinds[rank], cores) for rank in kinds)
        place, explanation = self._whole(kind, cores, unseen)
        waiting = [self._seen[rank] for rank in victims] or list(self._seen.values())
        return HangDiagnosis(
            culprits=tuple(kinds),
            victims=tuple(victims),
            kind=kind,
            findings=findings,
            involved=self._involved(findings, place, cores),
            unseen=tuple(unseen),
            explanation=explanation,
            age_s=max((s.phase_age_s for s in waiting if s.phase_age_s is not None), default=None),
            step=max((s.progress.step for s in waiting if s.progress is not None), default=-1),
            evidence=self._evidence(cores, unseen),
        )

    def _missed_by(self, culprits: set[int]) -> dict[int, list[Wait]]:
        """By culprit, the waits of the group in which most ranks wait for it."""
        by_place: dict[int, list[Wait]] = defaultdict(list)
        for waits in self._graph.waits.values():
            for wait in waits:
                if wait.kind is WaitKind.ABSENT:
                    by_place[id(wait.place)].append(wait)
        best: dict[int, list[Wait]] = {}
        for waits in by_place.values():
            for rank in culprits & set(waits[0].place.ranks):
                missed = [wait for wait in waits if _is_absent(rank, wait)]
                if len(missed) > len(best.get(rank, ())):
                    best[rank] = missed
        return best

    def _finding(self, rank: int, kind: HangKind, cores: Sequence[Core]) -> Finding:
        snapshot = self._seen[rank]
        explanation, operation = self._why(rank, kind, cores)
        side = "gpu" if kind is HangKind.GPU_STUCK else "cpu"
        return Finding(
            rank=rank,
            kind=kind,
            explanation=explanation,
            side="" if kind is HangKind.NODE_UNREACHABLE else side,
            host=snapshot.host,
            device=snapshot.device,
            where=snapshot.where,
            operation=operation,
        )

    def _why(self, rank: int, kind: HangKind, cores: Sequence[Core]) -> tuple[str, str]:
        """Return the explanation and the operation that it is about."""
        snapshot = self._seen[rank]
        if kind is HangKind.MISMATCH:
            return self._other_path(rank, cores)
        missed, operation = self._absence(rank)
        if kind is HangKind.GPU_STUCK and rank in self._stuck:
            return self._unfinished(rank)
        first = {
            HangKind.PROCESS_DEAD: _death(snapshot),
            HangKind.NODE_UNREACHABLE: "does not answer, nor does its node",
            HangKind.GPU_STUCK: "has operations on its device that no other rank holds up",
            HangKind.PROCESS_STOPPED: "is stopped by a signal or a debugger",
            HangKind.INPUT_STALL: f"waits for its data{_since(snapshot)}",
            HangKind.CHECKPOINT_STALL: f"is in a save or load{_since(snapshot)}",
        }.get(kind, _standing(snapshot))
        parts = [part for part in (first, missed, _last_entered(snapshot)) if part]
        return " and ".join(parts) or "holds up others", operation

    def _absence(self, rank: int) -> tuple[str, str]:
        waits = self._missed.get(rank)
        if not waits:
            return "", ""
        place = waits[0].place
        first = min(waits, key=lambda wait: (wait.sequence, wait.rank))
        known = [w.operation for w in waits if w.sequence == first.sequence and w.operation]
        named = max(known, key=lambda op: (bool(op.call_site), bool(op.arguments)), default=None)
        what = f"{describe(named)} #{first.sequence} of {place.title}"
        if isinstance(place, PairView):
            return f"has not met the {what}, in which rank {first.rank} waits", what
        many = _of_members(waits, place)
        return f"has not entered {what}{_site(named)}, in which {many} wait", what

    def _unfinished(self, rank: int) -> tuple[str, str]:
        view, operation = self._stuck[rank]
        done = sum((s.completed or -1) >= operation.sequence for s in view.states.values())
        what = f"{describe(operation)} #{operation.sequence} of {view.title}"
        many = f"{done} of {len(view.ranks)} members have completed"
        return f"does not finish {what}, which {many}", what

    def _other_path(self, rank: int, cores: Sequence[Core]) -> tuple[str, str]:
        for divergence in self._divergences:
            if rank in divergence.culprits:
                mine = next(camp for camp in divergence.camps if rank in camp.ranks)
                most = divergence.camps[0]
                many = f"{len(most.ranks)} of {len(divergence.place.ranks)} members"
                what = _number(divergence)
                return f"entered {_camp(mine)}{what}, where {many} entered {_camp(most)}", mine.what
        missed, _ = self._absence(rank)
        wait = self._graph.waits[rank][0]
        mine_text = f"{describe(wait.operation)} #{wait.sequence} of {wait.place.title}"
        return f"waits in {mine_text}{_site(wait.operation)}, but {missed}", mine_text

    def _whole(
        self, kind: HangKind, cores: Sequence[Core], unseen: Sequence[int]
    ) -> tuple[GroupView | PairView | None, str]:
        """The place that the whole hang is about, and a sentence when nobody is named."""
        if kind is HangKind.MISMATCH and self._divergences:
            divergence = self._divergences[0]
            camps = " against ".join(
                f"{_camp(camp)} by {ranks_text(camp.ranks)}" for camp in divergence.camps[:SHOWN]
            )
            return (
                divergence.place,
                f"members entered different operations{_number(divergence)}: {camps}",
            )
        if kind is HangKind.CYCLE:
            cycle = next(core.cycle for core in cores if core.cycle)
            steps = ", ".join(_step(wait) for wait in cycle[:SHOWN])
            return None, f"{len(cycle)} ranks wait for each other in a circle: {steps}"
        if kind is HangKind.GROUP_STALL:
            return self._stall(next(core for core in cores if core.stalled))
        if kind is HangKind.EVIDENCE_MISSING:
            return None, _why_missing(cores, unseen)
        waits = max(self._missed.values(), key=len, default=[])
        return (waits[0].place if waits else None), ""

    def _stall(self, core: Core) -> tuple[GroupView | PairView | None, str]:
        place = core.stalled
        assert place is not None
        wait = next(w for rank in core.ranks for w in self._graph.waits[rank] if w.place is place)
        what = f"{describe(wait.operation)} #{wait.sequence} of {place.title}"
        return place, f"all {len(place.ranks)} members have joined {what} and it does not complete"

    def _involved(
        self,
        findings: Sequence[Finding],
        place: GroupView | PairView | None,
        cores: Sequence[Core],
    ) -> tuple[int, ...]:
        if place is not None:
            return tuple(sorted(place.ranks))
        if findings and findings[0].rank in self._stuck:
            return tuple(sorted(self._stuck[findings[0].rank][0].ranks))
        return tuple(sorted({rank for core in cores for rank in core.ranks}))

    def _evidence(self, cores: Sequence[Core], unseen: Sequence[int]) -> dict[str, Any]:
        """JSON values that let a reader check the verdict."""
        waits = max(self._missed.values(), key=len, default=[])
        found: dict[str, Any] = {
            "ranks_seen": len(self._seen),
            "ranks_waiting": len(self._graph.waits),
        }
        if waits and isinstance(waits[0].place, GroupView):
            found["votes"] = _votes(waits[0].place, waits)
        if self._divergences:
            found["camps"] = [
                {"operation": camp.what, "ranks": list(camp.ranks), "call_site": camp.call_site}
                for camp in self._divergences[0].camps
            ]
        circles = [core.cycle for core in cores if core.cycle]
        if circles:
            found["cycle"] = [_step(wait) for wait in circles[0]]
        stalls = [core.stalled.title for core in cores if core.stalled]
        if stalls:
            found["stalled"] = stalls
        if unseen:
            found["no_evidence_of"] = list(unseen)
        return found


def _why_missing(cores: Sequence[Core], unseen: Sequence[int]) -> str:
    if not unseen and cores:
        who = ranks_text(cores[0].ranks)
        return f"{who} hold each other up, but which of their operations meet is not known"
    who = f"{ranks_text(unseen)}, of which" if unseen else "ranks of which"
    return f"the waits lead to {who} there is not enough evidence to decide"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks in words, the first few of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")


def _votes(view: GroupView, waits: Sequence[Wait]) -> dict[str, Any]:
    """C3 Exact over the group, on the last operation each member has entered (Algorithm 1)."""
    entered = {rank: state.enqueued for rank, state in view.states.items()}
    verdict = exact(
        [
            Missing("not known what it entered")
            if entered.get(rank) is None
            else Fingerprint(view.key, entered[rank] or 0, "", "")
            for rank in view.ranks
        ]
    )
    return {
        "group": view.title,
        "members": len(view.ranks),
        "waiting": len({wait.rank for wait in waits}),
        "status": verdict.status.value,
        "outliers": sorted(view.ranks[position] for position in verdict.outliers),
    }


def _is_absent(rank: int, wait: Wait) -> bool:
    if wait.rank == rank:
        return False
    if isinstance(wait.place, PairView):
        return True
    state = wait.place.states.get(rank)
    return state is None or state.enqueued is None or state.enqueued < wait.sequence


def _of_members(waits: Sequence[Wait], place: GroupView) -> str:
    return f"{len({wait.rank for wait in waits})} of {len(place.ranks)} members"


def _step(wait: Wait) -> str:
    what = f"rank {wait.rank} in {describe(wait.operation)} #{wait.sequence} of {wait.place.title}"
    return what + _site(wait.operation)


def _camp(camp: Camp) -> str:
    return camp.what + (f" at {camp.call_site}" if camp.call_site else "")


def _number(divergence: Divergence) -> str:
    number = "" if divergence.sequence is None else f" as #{divergence.sequence}"
    return f"{number} of {divergence.place.title}"


def _site(operation: Operation | None) -> str:
    return f" at {operation.call_site}" if operation and operation.call_site else ""


def _last_entered(snapshot: RankSnapshot) -> str:
    """Where a rank was seen last, when its stack is not known."""
    known = [op for state in snapshot.groups for op in state.operations]
    known += [op for channel in snapshot.channels for op in channel.operations]
    dated = [op for op in known if op.call_site and op.age_s is not None]
    if snapshot.where or not dated:
        return ""
    last = min(dated, key=lambda op: op.age_s or 0.0)
    return f"was last seen in {describe(last)}{_site(last)}"


def _since(snapshot: RankSnapshot) -> str:
    return "" if snapshot.phase_age_s is None else f" for {snapshot.phase_age_s:.0f} s"


def _standing(snapshot: RankSnapshot) -> str:
    """What a rank that never arrived is known to do instead."""
    if snapshot.state is ProcessState.EXITED:
        return "has ended with exit code 0"
    if snapshot.phase is Phase.FINISHED:
        return "has left the training loop"
    if snapshot.state is ProcessState.UNINTERRUPTIBLE:
        return "is in uninterruptible sleep (a disk, a mount or a driver)"
    return ""


def _death(snapshot: RankSnapshot) -> str:
    if snapshot.exit_code is None:
        how = "has died"
    elif snapshot.exit_code < 0:
        how = f"was killed by {_signal_name(-snapshot.exit_code)}"
    else:
        how = f"ended with exit code {snapshot.exit_code}"
    return f"{how} ({snapshot.error})" if snapshot.error else how


def _signal_name(number: int) -> str:
    known = {item.value: item.name for item in signal.Signals}
    return known.get(number, f"signal {number}")
