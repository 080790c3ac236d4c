"""A diagnosis of slow communication groups as `Incident` records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, Culprit, Incident, Kind, name_ranks
from scout_core.decision.localize import Conclusion, Diagnosis, Finding
from scout_core.decision.topology import Topology


class _Rule(NamedTuple):
    kind: Kind
    reason: str
    action: Action
    advice: str


RULES: dict[Conclusion, _Rule] = {
    "machine": _Rule(
        Kind.STRAGGLER, "STRAGGLER_MACHINE", Action.REPLACE_MACHINE, "replace the machine"
    ),
    "link": _Rule(
        Kind.STRAGGLER,
        "STRAGGLER_LINK",
        Action.DIAGNOSE_HARDWARE,
        "test the links inside the machine",
    ),
    "network": _Rule(
        Kind.STRAGGLER,
        "STRAGGLER_NETWORK",
        Action.DIAGNOSE_NETWORK,
        "hand over to network diagnosis; no rank is at fault by this evidence",
    ),
    "cluster": _Rule(
        Kind.GROUP_SLOWDOWN,
        "SLOWDOWN_CLUSTER",
        Action.ESCALATE,
        "look for contention or a software change; no hardware is accused",
    ),
}


def to_incidents(
    diagnosis: Diagnosis,
    topology: Topology,
    *,
    step: int = -1,
    slowdowns: Mapping[tuple[int, ...], float] | None = None,
) -> tuple[Incident, ...]:
    """Describe each finding: who, where, what, how sure, what to do.

    Args:
        step: optimizer step of the evidence, -1 when unknown.
        slowdowns: how many times their usual duration the slow groups take, by their members.

    Only the conclusion "machine" names culprits; several when their machine is certain and the
    rank is not. The latest checkpoint can be kept in every case.
    """
    return tuple(_incident(f, topology, step, slowdowns or {}) for f in diagnosis.findings)


def _incident(
    finding: Finding, topology: Topology, step: int, slowdowns: Mapping[tuple[int, ...], float]
) -> Incident:
    rule = RULES[finding.conclusion]
    accused = finding.suspects if finding.conclusion == "machine" else ()
    culprits = tuple(
        Culprit(rank, topology.hosts[rank], finding.resource, topology.dense[rank])
        for rank in accused
    )
    factors = [slowdowns[o.ranks] for o in finding.supporting if o.ranks in slowdowns]
    times = f", up to {max(factors):.2f} times as long as usual" if factors else ""
    when = f" at step {step}" if step >= 0 else ""
    return Incident(
        kind=rule.kind,
        reason=rule.reason,
        status=Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE,
        message=(
            f"{_who(finding, culprits)}: {finding.why}{times}{when} ({_votes(finding)}); "
            f"{rule.advice}; the latest checkpoint can be kept"
        ),
        id=_identity(finding),
        step=step,
        culprits=culprits,
        peer_group=finding.suspects,
        evidence={
            "conclusion": finding.conclusion,
            "host": finding.host,
            "resource": finding.resource,
            "supporting": [[o.kind, list(o.ranks)] for o in finding.supporting],
            "contradicting": [[o.kind, list(o.ranks)] for o in finding.contradicting],
            "times_usual": {_label(ranks): round(f, 4) for ranks, f in sorted(slowdowns.items())},
        },
        action=rule.action,
    )


def _who(finding: Finding, culprits: tuple[Culprit, ...]) -> str:
    if finding.conclusion == "machine" and finding.rank is None and finding.host:
        return f"communication is slow on {finding.host}"
    if culprits:
        return f"communication of {name_ranks(culprits)} is slow"
    where = f" on {finding.host}" if finding.host else ""
    return f"{finding.conclusion} slow{where}, no rank named"


def _votes(finding: Finding) -> str:
    slow, other = len(finding.supporting), len(finding.contradicting)
    return f"{slow} slow groups support it, {other} with its members are not slow"


def _label(ranks: tuple[int, ...]) -> str:
    return " ".join(str(rank) for rank in ranks)


def _identity(finding: Finding) -> str:
    """The same on every rank that comes to the same verdict."""
    parts = (finding.conclusion, finding.host, finding.suspects)
    return "slow-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
