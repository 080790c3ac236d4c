"""The progress ring: what one trainer publishes in shared memory, and how it is read.

Torch-free and pydantic-free: the trainer writes it (`evidence.progress`, `evidence.collectives`),
an observer agent in another process reads it. One ring is one anonymous memory file of fixed size.

# Note [Ring consistency]
A record is written as a whole into the slot after the newest one; then one aligned 8-byte store of
the head publishes it. A writer that is killed anywhere in between leaves the previous state intact.
Words are stored through a memoryview of native "Q", which is one store; `struct` with an explicit
byte order would write byte by byte. A reader copies a slot and accepts it only when the slot
carries the number it was looked up by, so an overwritten slot is skipped, never misread. Times are
CLOCK_MONOTONIC nanoseconds, which all processes of a node share: a jump of the wall clock is no
hang.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from scout_core.errors import ScoutError

SIZE_BYTES: Final = 4 << 20  # a sparse file: only touched pages take memory
PROGRESS_SLOTS: Final = 64
OPERATION_SLOTS: Final = 512
GROUP_SLOTS: Final = 512
ORDER_SLOTS: Final = 1024

MAGIC: Final = b"SCOUTRG1"
HEADER = struct.Struct("@8sQ")
# number, entered, step, phase, operation, detail
PROGRESS = struct.Struct("@QQqIII")
# number, entered, done, sequence, step, numel, tag, order, operation, site, phase
OPERATION = struct.Struct("@QQQqqqqIIII")
# name, ranks, backend
GROUP = struct.Struct("@III")
# entered, completed, group, peer, kind
ORDER = struct.Struct("@QQIii")

# Words of the header, counted in 8 bytes.
PROGRESS_HEAD: Final = 2
OPERATION_HEAD: Final = 3
COMPLETIONS: Final = 4
LAST_COMPLETION: Final = 5
GROUP_HEAD: Final = 6
ORDER_HEAD: Final = 7
LOST: Final = 8
END: Final = 9
END_TEXT: Final = 10
END_TIME: Final = 11

PROGRESS_AT: Final = 4096
PROGRESS_STRIDE: Final = 64
OPERATIONS_AT: Final = PROGRESS_AT + PROGRESS_SLOTS * PROGRESS_STRIDE
OPERATION_STRIDE: Final = 128
DONE_WORD: Final = 2
GROUP_AT: Final = OPERATIONS_AT + OPERATION_SLOTS * OPERATION_STRIDE
GROUP_STRIDE: Final = 16
ORDER_AT: Final = GROUP_AT + GROUP_SLOTS * GROUP_STRIDE
ORDER_STRIDE: Final = 32
ENTERED_WORD: Final = 0
COMPLETED_WORD: Final = 1
TEXT_AT: Final = ORDER_AT + ORDER_SLOTS * ORDER_STRIDE

assert PROGRESS.size <= PROGRESS_STRIDE
assert OPERATION.size <= OPERATION_STRIDE
assert GROUP.size <= GROUP_STRIDE
assert ORDER.size <= ORDER_STRIDE

COLLECTIVE: Final = 0
SEND: Final = 1
RECEIVE: Final = 2

RUNNING: Final = 0  # the trainer works
CLOSED: Final = 1  # it ended on purpose
FAILED: Final = 2  # it ended by an exception, whose text is in the ring
EXITING: Final = 3  # the interpreter ends; the exit code will tell how

UNKNOWN_TEXT: Final = ""
MAX_TEXT_BYTES: Final = 1 << 17
NO_PEER: Final = -1
UNTRACKED: Final = (1 << 64) - 1  # a completion that cannot be told


class Progress(NamedTuple):
    """Where a trainer is: published before everything that may block."""

    step: int = 0  # optimizer step
    phase: str = ""  # a value of `decision.snapshots.Phase`
    operation: int = 0  # counts boundaries inside the step
    detail: str = ""  # module or part of the step
    entered_ns: int = 0


class Order(NamedTuple):
    """Operations that are counted together: of a group, or one direction with one peer."""

    group: int  # index into `RingState.groups`
    kind: int  # COLLECTIVE, SEND or RECEIVE
    peer: int  # global rank; -1 for collectives, and for receives from anybody
    entered: int  # number of the last one that was entered, from 1
    completed: int | None  # all up to this one are complete; None: cannot be told


class Operation(NamedTuple):
    """One collective, send or receive that a trainer entered."""

    number: int  # counts all operations of this rank, from 1
    order: int  # index into `RingState.orders`
    sequence: int  # its number in that order
    operation: str  # "all_reduce float32 sum": equal on all members
    numel: int  # elements, -1 when ranks may differ in it
    tag: int
    step: int
    phase: str
    site: str  # "file.py:12 function": the innermost line outside of torch
    entered_ns: int
    done_ns: int  # 0 while it is not known to be complete


class Group(NamedTuple):
    """One process group that a trainer used."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in group order
    backend: str


class Counters(NamedTuple):
    """What an agent polls: equal counters mean "no visible progress"."""

    progress: int
    operations: int
    completions: int


@dataclass(frozen=True)
class RingState:
    """Everything that one ring says at one moment."""

    rank: int
    counters: Counters
    progress: Progress
    operations: tuple[Operation, ...]
    """Oldest first; at most `OPERATION_SLOTS`."""
    groups: tuple[Group, ...]
    orders: tuple[Order, ...]
    last_change_ns: int
    """Time of the newest publication or completion; 0 before the first."""
    end: int
    """RUNNING, CLOSED, FAILED or EXITING."""
    end_reason: str
    lost: int
    """Texts, groups or orders that did not fit."""


class RingReader:
    """The agent's side: reads a ring that another process writes."""

    def __init__(self, memory: mmap.mmap | bytes) -> None:
        """Read from a mapping or from a copy.

        Raises:
            ScoutError: this is no ring, or one of another version.
        """
        self._memory = memory
        magic, rank = HEADER.unpack_from(memory, 0) if len(memory) == SIZE_BYTES else (b"", 0)
        if magic != MAGIC:
            raise ScoutError(
                f"memory of {len(memory)} bytes is no progress ring of this version; "
                "all ranks of a job must run the same version of SCOUT"
            )
        self._words = memoryview(memory).cast("Q")
        self.rank = int(rank)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RingReader:
        """Map a ring read-only by path, for example /proc/PID/fd/N.

        Raises:
            OSError: the process is gone or belongs to somebody else.
            ScoutError: it is no ring.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != SIZE_BYTES:
                raise ScoutError(f"{path} is no progress ring of this version")
            return cls(mmap.mmap(descriptor, SIZE_BYTES, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def counters(self) -> Counters:
        """Return what changes whenever the trainer makes visible progress."""
        words = self._words
        return Counters(words[PROGRESS_HEAD], words[OPERATION_HEAD], words[COMPLETIONS])

    def end(self) -> int:
        """Return RUNNING, CLOSED, FAILED or EXITING."""
        return self._words[END]

    def end_ns(self) -> int:
        """Return when the trainer said that it ends; 0 when it has not."""
        return self._words[END_TIME]

    def progress(self) -> Progress:
        """Return the newest progress record."""
        head = self._words[PROGRESS_HEAD]
        for number in range(head, max(head - PROGRESS_SLOTS, 0), -1):
            at = PROGRESS_AT + number % PROGRESS_SLOTS * PROGRESS_STRIDE
            values = PROGRESS.unpack_from(self._memory, at)
            if values[0] == number and self._words[at // 8] == number:
                _, entered, step, phase, operation, detail = values
                return Progress(step, self._text(phase), operation, self._text(detail), entered)
        return Progress()

    def state(self) -> RingState:
        """Read everything."""
        counters = self.counters()
        progress, operations = self.progress(), self._operations()
        times = [progress.entered_ns, self._words[LAST_COMPLETION]]
        times += [operation.entered_ns for operation in operations[-1:]]
        return RingState(
            rank=self.rank,
            counters=counters,
            progress=progress,
            operations=operations,
            groups=tuple(self._group(i) for i in range(self._words[GROUP_HEAD])),
            orders=tuple(self._order(i) for i in range(self._words[ORDER_HEAD])),
            last_change_ns=max(times),
            end=self.end(),
            end_reason=self._text(self._words[END_TEXT]),
            lost=self._words[LOST],
        )

    def _operations(self) -> tuple[Operation, ...]:
        head = self._words[OPERATION_HEAD]
        found = (self._operation(n) for n in range(max(1, head - OPERATION_SLOTS + 1), head + 1))
        return tuple(operation for operation in found if operation is not None)

    def _operation(self, number: int) -> Operation | None:
        at = OPERATIONS_AT + number % OPERATION_SLOTS * OPERATION_STRIDE
        values = OPERATION.unpack_from(self._memory, at)
        if values[0] != number or self._words[at // 8] != number:
            return None  # overwritten meanwhile: see Note [Ring consistency]
        _, entered, done, sequence, step, numel, tag, order, name, site, phase = values
        return Operation(
            number=number,
            order=order,
            sequence=sequence,
            operation=self._text(name),
            numel=numel,
            tag=tag,
            step=step,
            phase=self._text(phase),
            site=self._text(site),
            entered_ns=entered,
            done_ns=done,
        )

    def _group(self, index: int) -> Group:
        name, ranks, backend = GROUP.unpack_from(self._memory, GROUP_AT + index * GROUP_STRIDE)
        return Group(self._text(name), expand_ranks(self._text(ranks)), self._text(backend))

    def _order(self, index: int) -> Order:
        values = ORDER.unpack_from(self._memory, ORDER_AT + index * ORDER_STRIDE)
        entered, completed, group, peer, kind = values
        return Order(group, kind, peer, entered, None if completed == UNTRACKED else completed)

    def _text(self, identity: int) -> str:
        at = TEXT_AT + identity * 8
        length = self._words[at // 8]
        if length > MAX_TEXT_BYTES:
            return UNKNOWN_TEXT  # a reader must survive whatever it finds
        return self._memory[at + 8 : at + 8 + length].decode("utf-8", "replace")


def compress_ranks(ranks: tuple[int, ...]) -> str:
    """Write ranks as runs "first:last:stride", so that a world of 16,384 is a few bytes."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs:
            first, last, stride = runs[-1]
            if first == last and rank != last:
                runs[-1] = [first, rank, rank - last]
                continue
            if first != last and rank - last == stride:
                runs[-1][1] = rank
                continue
        runs.append([rank, rank, 1])
    return ",".join(f"{first}:{last}:{stride}" for first, last, stride in runs)


@functools.lru_cache(maxsize=4096)
def expand_ranks(text: str) -> tuple[int, ...]:
    """Read what `compress_ranks` wrote; equal texts give the same object."""
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, last, stride = (int(part) for part in run.split(":"))
        ranks.extend(range(first, last + (1 if stride > 0 else -1), stride))
    return tuple(ranks)
