"""What the hang verdict says: who holds the job up, who only waits, and what kind of hang it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, Kind


class HangKind(enum.StrEnum):
    """Kinds of hang; when several are found, the one listed first names the incident."""

    PROCESS_DEAD = "process_dead"  # a trainer process ended
    NODE_UNREACHABLE = "node_unreachable"  # a node does not answer
    PROCESS_STOPPED = "process_stopped"  # a trainer process is stopped by a signal
    GPU_STUCK = "gpu_stuck"  # a device does not finish what all members have joined
    MISMATCH = "mismatch"  # members of a group entered different operations
    INPUT_STALL = "input_stall"  # a rank waits for its data
    CHECKPOINT_STALL = "checkpoint_stall"  # a rank does not come back from a save or load
    NEVER_ARRIVED = "never_arrived"  # the others wait in an operation a rank has not entered
    CYCLE = "cycle"  # ranks wait for each other in a circle: nobody is singled out
    GROUP_STALL = "group_stall"  # everybody joined and nothing completes: transport or hardware
    EVIDENCE_MISSING = "evidence_missing"  # the waits lead to ranks of which nothing is known
    NONE = "none"  # nobody waits for anybody who is late


@dataclass(frozen=True)
class Rule:
    """How a kind of hang is reported."""

    reason: str
    """Stable code, explained in docs/operations.md."""
    kind: Kind
    action: Action
    advice: str
    """What to do, as the end of a sentence."""


RULES = {
    HangKind.PROCESS_DEAD: Rule(
        "PROCESS_DEAD",
        Kind.PROCESS_DEAD,
        Action.RESTART_IN_PLACE,
        "read its log and restart the job",
    ),
    HangKind.NODE_UNREACHABLE: Rule(
        "NODE_UNREACHABLE",
        Kind.HANG,
        Action.REPLACE_MACHINE,
        "check the machine and replace it",
    ),
    HangKind.PROCESS_STOPPED: Rule(
        "PROCESS_STOPPED",
        Kind.HANG,
        Action.RESTART_IN_PLACE,
        "find out who stopped it; SIGCONT lets it go on",
    ),
    HangKind.GPU_STUCK: Rule(
        "HANG_GPU_STUCK",
        Kind.HANG,
        Action.DIAGNOSE_HARDWARE,
        "test its device and restart without it",
    ),
    HangKind.MISMATCH: Rule(
        "HANG_MISMATCH",
        Kind.HANG,
        Action.RESTART_IN_PLACE,
        "compare the call sites: the program took different paths",
    ),
    HangKind.INPUT_STALL: Rule(
        "INPUT_STALL",
        Kind.INPUT_STALL,
        Action.RESTART_IN_PLACE,
        "check its data loader and storage",
    ),
    HangKind.CHECKPOINT_STALL: Rule(
        "CHECKPOINT_STALL",
        Kind.CHECKPOINT_STALL,
        Action.RESTART_IN_PLACE,
        "check its storage",
    ),
    HangKind.NEVER_ARRIVED: Rule(
        "HANG_NEVER_ARRIVED",
        Kind.HANG,
        Action.RESTART_IN_PLACE,
        "look at its stack and restart in place on the same hardware",
    ),
    HangKind.CYCLE: Rule(
        "HANG_CYCLE",
        Kind.HANG,
        Action.ESCALATE,
        "change the program: the order of operations differs between ranks",
    ),
    HangKind.GROUP_STALL: Rule(
        "HANG_GROUP_STALL",
        Kind.HANG,
        Action.DIAGNOSE_NETWORK,
        "diagnose the network and the devices of the group",
    ),
    HangKind.EVIDENCE_MISSING: Rule(
        "HANG_EVIDENCE_MISSING",
        Kind.HANG,
        Action.ESCALATE,
        "collect the missing evidence",
    ),
}
"""By kind; NONE has no rule, because there is nothing to report."""


@dataclass(frozen=True)
class Finding:
    """Why one rank is a culprit."""

    rank: int
    kind: HangKind
    explanation: str
    """What it did or did not do, to follow "rank 5 on host-1"."""
    side: str = ""
    """"gpu": its device is stuck. "cpu": its program. Empty: neither can be told."""
    host: str = ""
    device: str = ""
    where: str = ""
    """Python stack line, when it is known."""
    operation: str = ""
    """What the others wait in, or what it entered instead."""


@dataclass(frozen=True)
class HangDiagnosis:
    """Culprits and victims are disjoint, and both are empty when nobody is held up."""

    culprits: tuple[int, ...]
    """Global ranks at fault, ascending; empty when nobody can be singled out."""
    victims: tuple[int, ...]
    """Global ranks that only wait, ascending."""
    kind: HangKind
    findings: tuple[Finding, ...] = ()
    """One per culprit, in the order of `culprits`."""
    involved: tuple[int, ...] = ()
    """Global ranks that were compared, or that hold each other up, ascending."""
    unseen: tuple[int, ...] = ()
    """Global ranks of which the evidence that would decide is missing, ascending."""
    explanation: str = ""
    """One sentence about the group that is held up."""
    age_s: float | None = None
    """Seconds since the job made progress last, when it is known."""
    step: int = -1
    """Optimizer step that the waiting ranks are in; -1 when unknown."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """JSON values only."""

    def __post_init__(self) -> None:
        assert not set(self.culprits) & set(self.victims)
        assert self.culprits == tuple(finding.rank for finding in self.findings)
        assert not self.culprits or self.kind is not HangKind.NONE

    @property
    def status(self) -> Status:
        """AGREE when there is no hang, ATTRIBUTED when culprits are named."""
        if self.culprits:
            return Status.ATTRIBUTED
        return Status.AGREE if self.kind is HangKind.NONE else Status.INCONCLUSIVE

    @property
    def side(self) -> str:
        """ "gpu" or "cpu" when all culprits are on that side, otherwise empty."""
        sides = {finding.side for finding in self.findings}
        return sides.pop() if len(sides) == 1 else ""

    @property
    def reason(self) -> str:
        """Stable code, explained in docs/operations.md; empty when there is no hang."""
        return RULES[self.kind].reason if self.kind in RULES else ""
