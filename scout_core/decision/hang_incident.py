"""A hang diagnosis as the one `Incident` record."""

from __future__ import annotations

import hashlib
from typing import Any

from scout_core.decision.hang_diagnosis import RULES, Finding, HangDiagnosis, HangKind
from scout_core.decision.incident import Culprit, Incident, name_ranks
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError

EXPLAINED = 3
"""Culprits whose explanation the message spells out; all of them are in the evidence."""


def to_incident(
    diagnosis: HangDiagnosis,
    *,
    topology: Topology | None = None,
    job: str = "",
    time: str = "",
) -> Incident:
    """Turn a diagnosis into an incident.

    Args:
        diagnosis: not of kind NONE.
        topology: gives the culprits their logical addresses, and hosts that are not known yet.
        job, time: copied into the incident.

    Raises:
        ScoutError: there is nothing to report, because nobody is held up.
    """
    if diagnosis.kind is HangKind.NONE:
        raise ScoutError("a diagnosis of kind 'none' is not an incident; check its kind first")
    rule = RULES[diagnosis.kind]
    culprits = tuple(_culprit(finding, topology) for finding in diagnosis.findings)
    return Incident(
        kind=rule.kind,
        reason=rule.reason,
        status=diagnosis.status,
        message=_message(diagnosis, culprits),
        id=_identity(diagnosis),
        time=time,
        job=job,
        step=diagnosis.step,
        culprits=culprits,
        victims=diagnosis.victims,
        peer_group=diagnosis.involved,
        evidence=_evidence(diagnosis),
        action=rule.action,
    )


def _culprit(finding: Finding, topology: Topology | None) -> Culprit:
    known = topology is not None and finding.rank < topology.world_size
    host = topology.hosts[finding.rank] if known and topology is not None else ""
    return Culprit(
        rank=finding.rank,
        host=finding.host or host,
        device=finding.device,
        coordinate=topology.dense[finding.rank] if known and topology is not None else None,
        module=finding.operation,
        where=finding.where,
    )


def _message(diagnosis: HangDiagnosis, culprits: tuple[Culprit, ...]) -> str:
    parts = [_who(diagnosis, culprits) if culprits else f"hang: {diagnosis.explanation}"]
    if not culprits:
        parts.append("nobody can be singled out")
    if diagnosis.victims:
        count = len(diagnosis.victims)
        parts.append("1 rank only waits" if count == 1 else f"{count} ranks only wait")
    if diagnosis.unseen:
        parts.append(f"no evidence of {len(diagnosis.unseen)} more that the waits lead to")
    if diagnosis.age_s is not None:
        parts.append(f"no progress for {diagnosis.age_s:.0f} s")
    parts.append(RULES[diagnosis.kind].advice)
    return "; ".join(parts)


def _who(diagnosis: HangDiagnosis, culprits: tuple[Culprit, ...]) -> str:
    if len(culprits) == 1:
        return f"{name_ranks(culprits)} {_why(diagnosis.findings[0])}"
    shown = [f"{f.rank} {_why(f)}" for f in diagnosis.findings[:EXPLAINED]]
    more = len(culprits) - EXPLAINED
    listed = "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
    return f"{name_ranks(culprits)} hold the job up: {listed}"


def _why(finding: Finding) -> str:
    return finding.explanation + (f", at {finding.where}" if finding.where else "")


def _evidence(diagnosis: HangDiagnosis) -> dict[str, Any]:
    found = dict(diagnosis.evidence)
    found["hang"] = diagnosis.kind.value
    found["side"] = diagnosis.side
    if diagnosis.age_s is not None:
        found["age_s"] = round(diagnosis.age_s, 3)
    found["findings"] = [
        {"rank": f.rank, "kind": f.kind.value, "side": f.side, "explanation": f.explanation}
        for f in diagnosis.findings
    ]
    return found


def _identity(diagnosis: HangDiagnosis) -> str:
    """The same for every observer that comes to the same verdict."""
    parts = (diagnosis.kind.value, diagnosis.culprits, diagnosis.involved, diagnosis.explanation)
    return "hang-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
