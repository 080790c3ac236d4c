"""C3 Exact on progress coordinates: the verdict where no pending operation is known.

A laggard leaves a stale coordinate and the waiters later, mutually equal ones.
This only holds among ranks that count operations alike, so with pipeline stages it usually ends
inconclusive; the wait-for graph of `decision.hang` decides wherever operations are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from scout_core.decision.consensus import Status, exact
from scout_core.decision.evidence import Missing
from scout_core.decision.hang_diagnosis import Finding, HangDiagnosis, HangKind
from scout_core.decision.snapshots import Phase, ProcessState, RankSnapshot

_STALLS = {Phase.DATA: HangKind.INPUT_STALL, Phase.CHECKPOINT: HangKind.CHECKPOINT_STALL}
_EXCUSED = frozenset({Phase.IDLE, Phase.FINISHED})


def by_coordinates(snapshots: Sequence[RankSnapshot]) -> HangDiagnosis:
    """Compare phases and coordinates of ranks none of which is known to wait for another.

    Args:
        snapshots: in rank order.
    """
    late = [s for s in snapshots if _is_late(s)]
    if not late:
        return HangDiagnosis((), (), HangKind.NONE)
    ranks = tuple(s.rank for s in snapshots)
    phases = {s.phase for s in snapshots}
    if len(phases) == 1 and late[0].phase in _STALLS:
        what = f"all {len(ranks)} ranks are in the {late[0].phase.value} phase"
        return _nobody(_STALLS[late[0].phase], ranks, late, what)
    stalled = _minority_in_a_stall(snapshots)
    if stalled:
        return _blame(stalled, snapshots, late)
    verdict = exact([s.progress or Missing("no progress published") for s in snapshots])
    if verdict.status is Status.AGREE:
        what = f"all {len(ranks)} ranks stopped at the same place, step {_step(late)}"
        return _nobody(HangKind.GROUP_STALL, ranks, late, what)
    behind = _behind(snapshots, verdict.outliers)
    if behind:
        return _blame(behind, snapshots, late)
    why = verdict.reason or "the ranks that differ are ahead of the others"
    return _nobody(HangKind.EVIDENCE_MISSING, ranks, late, f"progress alone cannot tell: {why}")


def _is_late(snapshot: RankSnapshot) -> bool:
    observed = snapshot.progress is not None or snapshot.phase is not Phase.UNKNOWN
    runs = snapshot.state not in (ProcessState.EXITED, ProcessState.DEAD)
    return observed and runs and snapshot.phase not in _EXCUSED and not snapshot.within_limit


def _behind(snapshots: Sequence[RankSnapshot], outliers: frozenset[int]) -> list[RankSnapshot]:
    """The outliers that stopped before the majority; one that is ahead holds nobody up."""
    majority = [s.progress for i, s in enumerate(snapshots) if s.progress and i not in outliers]
    return [
        snapshots[i]
        for i in sorted(outliers)
        if (place := snapshots[i].progress) is not None and place < majority[0]
    ]


def _minority_in_a_stall(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    verdict = exact([s.phase for s in snapshots])
    outliers = [snapshots[i] for i in sorted(verdict.outliers)]
    return [s for s in outliers if s.phase in _STALLS and _is_late(s)]


def _blame(
    behind: Sequence[RankSnapshot], snapshots: Sequence[RankSnapshot], late: Sequence[RankSnapshot]
) -> HangDiagnosis:
    culprits = tuple(s.rank for s in behind)
    findings = tuple(_finding(s, len(snapshots) - len(behind), len(snapshots)) for s in behind)
    return HangDiagnosis(
        culprits=culprits,
        victims=tuple(s.rank for s in late if s.rank not in culprits),
        kind=min((f.kind for f in findings), key=list(HangKind).index),
        findings=findings,
        involved=tuple(s.rank for s in snapshots),
        age_s=_age(late),
        step=_step(late),
    )


def _finding(snapshot: RankSnapshot, others: int, total: int) -> Finding:
    kind = _STALLS.get(snapshot.phase, HangKind.NEVER_ARRIVED)
    if kind is HangKind.NEVER_ARRIVED:
        assert snapshot.progress is not None
        step, operation = snapshot.progress
        what = f"stopped at step {step}, operation {operation}, where {others} of {total} went on"
    else:
        what = f"is in the {snapshot.phase.value} phase, which {others} of {total} are not"
    return Finding(
        rank=snapshot.rank,
        kind=kind,
        explanation=what,
        side="cpu",
        host=snapshot.host,
        device=snapshot.device,
        where=snapshot.where,
    )


def _nobody(
    kind: HangKind, ranks: tuple[int, ...], late: Sequence[RankSnapshot], why: str
) -> HangDiagnosis:
    return HangDiagnosis(
        culprits=(),
        victims=(),
        kind=kind,
        involved=ranks,
        explanation=why,
        age_s=_age(late),
        step=_step(late),
    )


def _age(late: Sequence[RankSnapshot]) -> float | None:
    return max((s.phase_age_s for s in late if s.phase_age_s is not None), default=None)


def _step(late: Sequence[RankSnapshot]) -> int:
    return max((s.progress.step for s in late if s.progress is not None), default=-1)
