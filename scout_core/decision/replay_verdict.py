"""What the gathered evidence of one check means: findings with culprits, or none.

Algorithm 2, lines 7 and 10-11, and the audit of state. The input is one `Report` per
rank of a work group (all ranks that run the same computation); C3 is applied inside each peer
group, and causes are ordered: a corrupt weight explains the wrong outputs that follow from it, so
each rank is blamed once, for the earliest stage that differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scout_core.decision import coherence, consensus
from scout_core.decision.coherence import Incoherent
from scout_core.decision.consensus import Status, Verdict
from scout_core.decision.evidence import Evidence, Missing, Signature
from scout_core.errors import ScoutError

BROADCAST = "broadcast"
PARAMETERS = "parameters"
STAGES = (BROADCAST, PARAMETERS, "output", "input_grad", "parameter_grad", "optimizer_update")
"""Stages of a replay in the order of their causes."""

REASONS = {
    "state": "SDC_STATE",
    BROADCAST: "SDC_BROADCAST",
    PARAMETERS: "SDC_GATHER",
    "output": "SDC_REPLAY_OUTPUT",
    "input_grad": "SDC_REPLAY_INPUT_GRAD",
    "parameter_grad": "SDC_REPLAY_PARAMETER_GRAD",
    "optimizer_update": "SDC_OPTIMIZER_UPDATE",
    "masters": "SDC_MASTER_COHERENCE",
    "edit": "STATE_EDITED",
    "rest": "SDC_AT_REST",
}
MASTERS = frozenset({REASONS["masters"], REASONS["edit"]})
AUDITED = MASTERS | {REASONS["state"], REASONS["rest"]}
"""Reasons that speak of memory at rest: no replay is needed to show them."""


@dataclass(frozen=True)
class Report:
    """Evidence of one rank at one check."""

    stages: Mapping[str, Signature] = field(default_factory=dict)
    """Signature per stage; a stage this recipe does not have is left out."""
    repeatable: bool = True
    """The first and the last repeat gave the same signatures."""
    finite: bool = True
    missing: str = ""
    """Why there is no evidence (an exception in the replay); empty when there is."""
    call_s: float | None = None
    gather_s: float | None = None
    state: Mapping[str, Signature] = field(default_factory=dict)
    """Folded signature per state unit, of the audit."""
    incoherent: tuple[Incoherent, ...] = ()
    """Parameters of this rank that were not their masters cast down since the last check."""
    moved: tuple[str, ...] = ()
    """State units that changed between two updates, while nothing may write them."""

    def to_wire(self) -> bytes:
        """Encode as JSON; nan and inf survive."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> Report:
        """Decode.

        Raises:
            ScoutError: written by another version of SCOUT.
        """
        try:
            plain = json.loads(data)
            for name in ("stages", "state"):
                plain[name] = {key: Signature(*value) for key, value in plain[name].items()}
            plain["moved"] = tuple(plain["moved"])
            plain["incoherent"] = tuple(Incoherent(*item) for item in plain["incoherent"])
            return cls(**plain)
        except (ValueError, TypeError, KeyError) as error:
            raise ScoutError(
                f"a peer's report cannot be read ({error}); all ranks must run the same SCOUT"
            ) from error


@dataclass(frozen=True)
class Finding:
    """One disagreement inside one group of ranks."""

    reason: str
    """Stable code, see docs/operations.md."""
    ranks: tuple[int, ...]
    """Global ranks at fault, ascending; empty when nobody can be blamed."""
    peers: tuple[int, ...]
    """Global ranks that were compared."""
    what: str
    """Stage, or name of the state unit."""
    why: str = ""
    """Why nobody is blamed; of the audit of masters: what was seen."""
    signatures: Mapping[int, str] = field(default_factory=dict)
    """Hex per global rank."""
    comparable: bool = True

    @property
    def attributed(self) -> bool:
        """Somebody is named."""
        return bool(self.ranks)


def judge_coherence(reports: Mapping[int, Report]) -> list[Finding]:
    """Name ranks whose parameters were not their own masters cast down; no peer is needed."""
    findings = []
    for judged in coherence.judge({rank: each.incoherent for rank, each in reports.items()}):
        reason = REASONS["masters" if judged.is_fault else "edit"]
        blamed = judged.ranks if judged.is_fault else ()
        what, why = ", ".join(judged.names[:4]), judged.evidence
        comparable = judged.is_fault
        findings.append(Finding(reason, blamed, judged.ranks, what, why, comparable=comparable))
    return findings


def judge_state(
    reports: Mapping[int, Report], replicas: Sequence[tuple[int, ...]], armed: Sequence[str]
) -> list[Finding]:
    """Compare state at rest across replicas, unit by unit.

    Args:
        reports: by global rank.
        replicas: groups of ranks whose state is equal (only d differs).
        armed: units that were equal at qualification; the others are not judged.
    """
    findings = []
    for group in replicas:
        for unit in armed if len(group) > 1 else ():
            values = [_part(reports[rank], reports[rank].state.get(unit)) for rank in group]
            verdict = consensus.exact(values)
            if verdict.status is not Status.AGREE:
                findings.append(_finding("state", unit, group, values, verdict))
    return findings


def judge_rest(reports: Mapping[int, Report]) -> list[Finding]:
    """Name the ranks whose state changed between two updates while their peers' did not.

    Software that edits weights between steps does so on at least half of the ranks: then nobody is
    named, and it is no finding.
    """
    moved = tuple(sorted(rank for rank, report in reports.items() if report.moved))
    if not moved or 2 * len(moved) >= len(reports):
        return []
    peers = tuple(sorted(reports))
    return [
        Finding(REASONS["rest"], (rank,), peers, ", ".join(reports[rank].moved[:4]))
        for rank in moved
    ]


def judge_replay(
    reports: Mapping[int, Report],
    peer_groups: Sequence[tuple[int, ...]],
    gather_groups: Sequence[tuple[int, ...]],
    blamed: frozenset[int] = frozenset(),
) -> list[Finding]:
    """Compare the replays inside each peer group, stage by stage.

    Args:
        reports: by global rank of one work group.
        peer_groups: groups that replayed the same source.
        gather_groups: groups whose members gather the parameters from each other; () when
            parameters are not sharded.
        blamed: ranks the state audit already named: what follows from it is not reported again.
    """
    findings: list[Finding] = []
    for group in peer_groups:
        findings += _judge_group(reports, group, gather_groups, blamed)
    return _merge_gathers(findings, gather_groups)


def _judge_group(
    reports: Mapping[int, Report],
    group: tuple[int, ...],
    gather_groups: Sequence[tuple[int, ...]],
    blamed: frozenset[int],
) -> list[Finding]:
    explained = set(blamed)
    findings: list[Finding] = []
    for gather in gather_groups:
        if blamed & set(gather):
            explained |= set(gather)  # a corrupt shard is gathered by all of them
    for stage in STAGES:
        if len(group) < 2 or not any(stage in reports[rank].stages for rank in group):
            continue
        values = [_part(reports[rank], reports[rank].stages.get(stage)) for rank in group]
        verdict = consensus.exact(values)
        if verdict.status is Status.AGREE:
            continue
        if verdict.status is Status.INCONCLUSIVE:
            if not explained & set(group) and not findings:
                findings.append(_finding(stage, stage, group, values, verdict))
            break
        new = frozenset(i for i in verdict.outliers if group[i] not in explained)
        if new:
            findings.append(_finding(stage, stage, group, values, Verdict(verdict.status, new)))
        explained |= {group[i] for i in verdict.outliers}
    return findings


def _merge_gathers(
    findings: list[Finding], gather_groups: Sequence[tuple[int, ...]]
) -> list[Finding]:
    """Turn "every member of a gather group has wrong parameters" into one finding without a name.

    One member alone received wrongly: it is named. When all members have the same wrong
    parameters, one of them sent a corrupt shard, and this evidence does not say which.
    """
    wrong = {rank for f in findings if f.reason == REASONS[PARAMETERS] for rank in f.ranks}
    merged = [f for f in findings if f.reason != REASONS[PARAMETERS]]
    rest = [f for f in findings if f.reason == REASONS[PARAMETERS]]
    for gather in gather_groups:
        if len(gather) > 1 and set(gather) <= wrong:
            why = (
                f"ranks {list(gather)} gathered the same wrong parameters from each other: "
                "one of them holds a corrupt shard"
            )
            merged.append(Finding("SDC_SHARD", (), gather, PARAMETERS, why))
            wrong -= set(gather)
    for finding in rest:
        left = tuple(rank for rank in finding.ranks if rank in wrong)
        if left or not finding.ranks:
            merged.append(_with_ranks(finding, left))
    return merged


def _with_ranks(finding: Finding, ranks: tuple[int, ...]) -> Finding:
    return Finding(
        finding.reason,
        ranks,
        finding.peers,
        finding.what,
        finding.why,
        finding.signatures,
        finding.comparable,
    )


def _part(report: Report, value: Signature | None) -> Evidence:
    if report.missing:
        return Missing(report.missing)
    return Missing("no such evidence") if value is None else value


def _finding(
    stage: str, what: str, group: tuple[int, ...], values: Sequence[Evidence], verdict: Verdict
) -> Finding:
    shown = {
        rank: f"{value.value:016x}"
        for rank, value in zip(group, values, strict=True)
        if isinstance(value, Signature)
    }
    ranks = tuple(group[i] for i in sorted(verdict.outliers))
    return Finding(REASONS[stage], ranks, group, what, verdict.reason, shown, verdict.comparable)


def durations(reports: Mapping[int, Report], group: Sequence[int]) -> dict[int, float]:
    """Collect the module times of a peer group, by global rank; missing ones are left out."""
    times: dict[int, Any] = {rank: reports[rank].call_s for rank in group}
    return {rank: float(time) for rank, time in times.items() if time is not None}
