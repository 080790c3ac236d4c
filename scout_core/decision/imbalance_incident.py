"""Explanations of slow work as `Incident` records."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

from scout_core.decision.consensus import Status
from scout_core.decision.imbalance import Cause, Explanation
from scout_core.decision.incident import Action, Culprit, Incident, Kind, name_ranks
from scout_core.decision.topology import Coordinate
from scout_core.decision.work import Work


class _Rule(NamedTuple):
    kind: Kind
    reason: str
    action: Action


RULES: dict[Cause, _Rule] = {
    Cause.STRAGGLER: _Rule(Kind.STRAGGLER, "STRAGGLER_COMPUTE", Action.REPLACE_MACHINE),
    Cause.STAGE: _Rule(Kind.IMBALANCE, "IMBALANCE_STAGE", Action.NONE),
    Cause.DATA: _Rule(Kind.IMBALANCE, "IMBALANCE_DATA", Action.NONE),
    Cause.PAUSES: _Rule(Kind.IMBALANCE, "IMBALANCE_PAUSES", Action.NONE),
    Cause.LOADING: _Rule(Kind.IMBALANCE, "IMBALANCE_LOADING", Action.NONE),
    Cause.ROTATING: _Rule(Kind.IMBALANCE, "IMBALANCE_ROTATING", Action.NONE),
    Cause.SLOWDOWN: _Rule(Kind.GROUP_SLOWDOWN, "SLOWDOWN_JOB", Action.ESCALATE),
}


def to_incident(
    found: Explanation, work: Work, *, hosts: Mapping[int, str] | None = None, step: int = -1
) -> Incident:
    """Describe one explanation: who or what, how much, since when, how sure, what to do.

    Args:
        hosts: host name by global rank, where known.
        step: optimizer step to report when the explanation has none of its own.
    """
    rule = RULES[found.cause]
    culprits = tuple(_culprit(rank, work, hosts or {}) for rank in found.ranks)
    return Incident(
        kind=rule.kind,
        reason=rule.reason,
        status=Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE,
        message=_MESSAGES[found.cause](found, work, culprits),
        id=_identity(found),
        step=found.last_step if found.last_step >= 0 else step,
        culprits=culprits,
        peer_group=found.peers,
        evidence={
            "factor": round(found.factor, 4) if math.isfinite(found.factor) else None,
            "steps": len(work.steps),
            **found.evidence,
        },
        action=rule.action if culprits or found.cause is not Cause.STRAGGLER else Action.ESCALATE,
    )


def _culprit(rank: int, work: Work, hosts: Mapping[int, str]) -> Culprit:
    worker = next(worker for worker in work.workers if worker.rank == rank)
    place = Coordinate(d=worker.replica, p=worker.stage)
    return Culprit(rank, hosts.get(rank, ""), coordinate=place, module="compute")


def _straggler(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    seen = f"{found.evidence['slow_steps']} of {found.evidence['judged_steps']} steps"
    when = f"steps {found.first_step} to {found.last_step}, named in {seen}"
    if not culprits:
        return (
            f"of ranks {list(found.peers)} in stage {found.stages[0]} some compute "
            f"{found.factor:.2f} times as long as others ({when}), and no strict majority says "
            "which are at fault: run hardware diagnostics on all of them"
        )
    place = culprits[0].coordinate
    assert place is not None
    what = f"computes {found.factor:.2f} times as long as its peers for the same work"
    if not math.isfinite(found.factor):
        what = "reports durations that are not finite or are negative"
    return (
        f"{name_ranks(culprits)} (replica {place.d}, stage {place.p}) {what} ({when}); check "
        "clocks, thermals and neighbours of that device; the latest checkpoint can be kept"
    )


def _stage(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    last = max(work.stages)
    names = [f"{stage} ({'last' if stage == last else 'not last'})" for stage in found.stages]
    which = f"stage {names[0]}" if len(names) == 1 else f"stages {', '.join(names)}"
    if last in found.stages and len(names) == 1:
        which = f"last stage slow: stage {last}"
    alike = f"all {len(found.peers)} of its ranks alike, so no rank is at fault"
    if not found.certain:
        alike = "one rank per stage, so a slow rank would look the same and nobody is named"
    return (
        f"{which} takes {found.factor:.2f} times as long as the other stages "
        f"({alike}); move layers away from it"
    )


def _data(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    how = {
        "tokens": "explained by the token counts",
        "stages": "the same micro-batches are slow in every stage",
        "operations": "forward and backward are slow alike",
    }[str(found.evidence["explained_by"])]
    always = found.evidence.get("always_replica")
    who = "a different rank is last each step" if always is None else f"replica {always} is last"
    return (
        f"uneven data: the largest share of a step is {found.factor:.2f} times the mean "
        f"({how}; {who}); no rank is at fault: balance sequence lengths over replicas"
    )


def _pauses(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    evidence = found.evidence
    how = "measured" if evidence["measured"] else "inferred from single slow operations"
    return (
        f"pauses of the CPU side, up to {evidence['longest_s']:.3f} s, cost "
        f"{100 * evidence['share_of_step']:.1f} % of a step on {evidence['ranks']} ranks ({how}); "
        "no rank is at fault: collect garbage on all ranks at the same step"
    )


def _loading(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    return (
        f"ranks wait for data for {100 * found.evidence['share_of_step']:.1f} % of a step; "
        "no rank is at fault by this evidence: look at the data loader and its storage"
    )


def _rotating(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    return (
        f"a different rank is last each step, {found.factor:.2f} times the mean, and nothing "
        "recorded tells why; record token counts and garbage collection to tell them apart"
    )


def _slowdown(found: Explanation, work: Work, culprits: tuple[Culprit, ...]) -> str:
    return (
        f"all ranks became {found.factor:.2f} times as slow from step {found.first_step} on; "
        "no rank stands out: look for a change of software, power or cooling"
    )


_MESSAGES = {
    Cause.STRAGGLER: _straggler,
    Cause.STAGE: _stage,
    Cause.DATA: _data,
    Cause.PAUSES: _pauses,
    Cause.LOADING: _loading,
    Cause.ROTATING: _rotating,
    Cause.SLOWDOWN: _slowdown,
}


def _identity(found: Explanation) -> str:
    """The same on every rank that comes to the same verdict."""
    parts = (found.cause.value, found.ranks, found.stages, found.first_step)
    return "slow-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
