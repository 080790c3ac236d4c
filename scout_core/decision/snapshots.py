"""What one rank looked like when the job stopped: the input of the hang verdict.

The live observer and the readers of dumps and logs both produce a `RankSnapshot` per rank, so
online and post mortem reach the same verdict by the same rules (`decision.hang`).

# Note [Counting operations]
Members of a group number its operations alike: the n-th collective has the same number on every
member. `enqueued` is the number of the last collective a rank has entered (handed to the group),
`completed` of the last one that is finished together with all before it. Numbers may start at 0
or 1; one below the first means "none yet". None means that the source cannot tell: unknown is
neither "arrived" nor "did not arrive". Numbers of different `counter`s are never compared.

Collectives are counted per group. Point-to-point operations are counted per directed pair
(`Channel`): the n-th send from a to b meets the n-th receive of b from a.

This module and `decision.snapshot_json`, its wire form, need nothing but the standard library, so
that observer processes can import them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from scout_core.decision.evidence import Progress

SCOUT_COUNTER = "scout"  # numbers given by SCOUT's own observer
C10D_COUNTER = "c10d"  # numbers given by torch's process groups: Flight Recorder, watchdog log


class ProcessState(enum.Enum):
    """What the operating system says about a trainer process."""

    UNKNOWN = "unknown"  # nobody looked: post mortem
    ALIVE = "alive"  # runs, sleeps or spins
    STOPPED = "stopped"  # SIGSTOP or a debugger
    UNINTERRUPTIBLE = "uninterruptible"  # state D: waits for a disk, a mount or a driver
    DEAD = "dead"  # ended by a signal, or with an exit code other than 0
    EXITED = "exited"  # ended with exit code 0
    UNREACHABLE = "unreachable"  # its node does not answer


class Phase(enum.Enum):
    """What part of the training loop a rank is in."""

    UNKNOWN = "unknown"
    INITIALIZE = "initialize"  # construction, compilation, until the first step has ended
    DATA = "data"  # waits for its data loader
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"  # saves or loads
    IDLE = "idle"  # paused through the API
    FINISHED = "finished"  # has left the training loop


class OperationState(enum.Enum):
    """How far one operation got on one rank."""

    SCHEDULED = "scheduled"  # entered; not known to run
    STARTED = "started"  # runs on the device or in the transport
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective, send or receive as one rank knows it."""

    sequence: int
    """Number in its group or channel; see Note [Counting operations]."""
    name: str
    """"all_reduce", "all_gather", "send", ...; the same word from every source."""
    arguments: str = ""
    """dtype, element count, reduce operation, root, tag: whatever must be equal on all members.

    Never values that may differ between ranks (uneven splits). Empty means unknown."""
    state: OperationState = OperationState.SCHEDULED
    call_site: str = ""
    """Python line that issued it, "file.py:12 function", when it is known."""
    age_s: float | None = None
    """Seconds since it was entered; only compared with other operations of the same rank."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """Collectives of one process group, as one member knows them."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks of the members, in group order, as this rank believes them to be.

    Give equal groups the same tuple object where you can: comparing 16,384 ranks is slow."""
    enqueued: int | None
    """Last collective this rank has entered; None: the source cannot tell."""
    completed: int | None = None
    """Last collective that is finished together with all before it; None: cannot tell."""
    started: int | None = None
    """Last collective that runs or ran; None: this source does not see starts."""
    operations: tuple[Operation, ...] = ()
    """The collectives of which more is known, ascending; not necessarily all of them."""
    description: str = ""
    """What the framework calls the group, such as "TENSOR_MODEL_PARALLEL_GROUP"."""
    backend: str = ""
    """"nccl", "gloo", ...; empty when unknown."""
    counter: str = SCOUT_COUNTER
    members_known: bool = True
    """False: `ranks` was pieced together, and the group may have more members."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of point-to-point traffic between this rank and a peer."""

    group: str
    peer: int
    """Global rank of the other end."""
    sending: bool
    """True: from this rank to the peer."""
    enqueued: int | None = None
    """Last operation posted, in numbers that both ends share; None: no shared numbers."""
    completed: int | None = None
    operations: tuple[Operation, ...] = ()
    """The operations of which more is known, in the order they were posted."""
    backend: str = ""
    counter: str = SCOUT_COUNTER


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """All that is known about one rank. Unknown fields keep their defaults."""

    rank: int
    """Global rank."""
    host: str = ""
    device: str = ""
    state: ProcessState = ProcessState.UNKNOWN
    state_age_s: float | None = None
    """Seconds since the process has been in `state` (since it died, was stopped, ...)."""
    exit_code: int | None = None
    """As `subprocess` counts: -9 means killed by signal 9."""
    progress: Progress | None = None
    """Coordinate published last: (optimizer step, operation in the step)."""
    phase: Phase = Phase.UNKNOWN
    phase_age_s: float | None = None
    """Seconds since the last visible progress, on a monotonic clock."""
    blocked: bool | None = None
    """True: its thread waits inside a communication call. False: it is elsewhere, so that its
    outstanding operations are not what holds it up. None: unknown."""
    within_limit: bool = False
    """It is still inside the time its phase may take: waiting for it is no fault."""
    where: str = ""
    """Python stack line, "file.py:12 function", when it is known."""
    error: str = ""
    """Last line of the exception that ended it, when it is known."""
    missing: str = ""
    """Why there is no evidence of this rank; empty when there is. Nothing else is then used."""
    truncated: bool = False
    """Operations may be outstanding that are not listed (a ring that wrapped)."""
    source: str = ""
    """Where the evidence comes from: "observer", a file name, ..."""
    complete: tuple[str, ...] = ()
    """Counters whose `groups` and `channels` are all listed: not listed means never entered."""
    unseen_p2p: bool = False
    """The job uses point-to-point operations that this source does not show."""
    groups: tuple[GroupState, ...] = ()
    channels: tuple[Channel, ...] = ()

    def __post_init__(self) -> None:
        assert self.rank >= 0
