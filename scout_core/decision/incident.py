"""The one record for every fault, online and post mortem (schema "scout.incident/1")."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from scout_core.decision.consensus import Status
from scout_core.decision.topology import Coordinate
from scout_core.errors import ScoutError

SCHEMA = "scout.incident/1"


class Kind(enum.Enum):
    """What went wrong."""

    SDC = "sdc"  # silent data corruption: a deterministic result differs from the majority's
    STRAGGLER = "straggler"  # a rank or machine needs longer for the same work
    HANG = "hang"  # the job makes no progress
    INPUT_STALL = "input_stall"  # a rank waits for its data
    CHECKPOINT_STALL = "checkpoint_stall"  # a rank does not come back from a save or load
    PROCESS_DEAD = "process_dead"  # a trainer process ended
    GROUP_SLOWDOWN = "group_slowdown"  # a whole group or job got slower: no rank stands out
    IMBALANCE = "imbalance"  # uneven work explains the time: no rank is at fault
    NOT_COMPARABLE = "not_comparable"  # ranks did different work; never called sdc


class Action(enum.Enum):
    """What the person on call does next."""

    NONE = "none"
    RESTART_IN_PLACE = "restart_in_place"
    REPLACE_MACHINE = "replace_machine"
    DIAGNOSE_HARDWARE = "diagnose_hardware"
    DIAGNOSE_NETWORK = "diagnose_network"
    ESCALATE = "escalate"


@dataclass(frozen=True)
class Culprit:
    """One rank that is at fault; unknown fields are empty."""

    rank: int
    """Global rank."""
    host: str = ""
    device: str = ""
    coordinate: Coordinate | None = None
    module: str = ""
    """Qualified name of the layer, parameter or operation."""
    where: str = ""
    """Python stack line, when it is known."""


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint to restart from."""

    choice: str = "none"
    """"latest", "verified" or "none"."""
    step: int | None = None
    path: str = ""


@dataclass(frozen=True)
class Incident:
    """A fault that was found. `id` is the same on every rank that reports it."""

    kind: Kind
    reason: str
    """Stable upper-case code, explained in docs/operations.md."""
    status: Status
    """ATTRIBUTED (culprits are named) or INCONCLUSIVE (nobody is)."""
    message: str
    """One sentence to act on: who, where, what, since when, how sure, what to do."""
    id: str = ""
    time: str = ""
    """UTC, ISO 8601."""
    job: str = ""
    step: int = -1
    """Optimizer step at which the evidence was taken; -1 when unknown."""
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    """Global ranks that only wait."""
    peer_group: tuple[int, ...] = ()
    """Global ranks that were compared."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """JSON values only: votes, repeats, durations in seconds, signatures in hex."""
    action: Action = Action.ESCALATE
    checkpoint: CheckpointChoice = CheckpointChoice()

    def __post_init__(self) -> None:
        assert self.status is not Status.AGREE

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        """Global ranks at fault, ascending."""
        return tuple(sorted({culprit.rank for culprit in self.culprits}))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with its schema; nan and inf become text."""
        plain = asdict(self)
        for name in ("kind", "status", "action"):
            plain[name] = getattr(self, name).value
        for culprit in plain["culprits"]:
            place = culprit["coordinate"]
            culprit["coordinate"] = None if place is None else Coordinate(*place)._asdict()
        return {"schema": SCHEMA, **json.loads(json.dumps(plain), parse_constant=str)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Incident:
        """Read a record back.

        Raises:
            ScoutError: another schema, or a field that does not belong to it.
        """
        try:
            fields = dict(record)
            schema = fields.pop("schema", None)
            if schema != SCHEMA:
                raise ValueError(f"schema {schema!r} is not {SCHEMA!r}")
            fields["kind"] = Kind(fields["kind"])
            fields["status"] = Status(fields["status"])
            if fields["status"] is Status.AGREE:
                raise ValueError("a record with status 'agree' is no incident")
            fields["action"] = Action(fields["action"])
            fields["culprits"] = tuple(_culprit(plain) for plain in fields["culprits"])
            fields["victims"] = tuple(fields["victims"])
            fields["peer_group"] = tuple(fields["peer_group"])
            fields["checkpoint"] = CheckpointChoice(**fields["checkpoint"])
            return cls(**fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ScoutError(f"incident record cannot be read: {error!r} in {record}") from error


def _culprit(plain: dict[str, Any]) -> Culprit:
    place = plain.get("coordinate")
    return Culprit(**{**plain, "coordinate": None if place is None else Coordinate(**place)})


def name_ranks(culprits: tuple[Culprit, ...]) -> str:
    """Say who in words: "rank 5 on host-1" or "ranks 2 on host-0 and 5 on host-1"."""
    names = [f"{c.rank} on {c.host}" if c.host else f"{c.rank}" for c in culprits]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}" if names else "no rank"
