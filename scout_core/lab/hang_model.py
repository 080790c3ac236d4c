"""A model of a tensor x pipeline x data parallel job that stops: evidence with a known culprit.

Every rank runs one program of collectives, sends and receives. Its CPU enters operations ahead of
its device; the device does them in order, and an operation completes when all its members' devices
have reached it. With a fault the job runs until nothing moves any more. What the ranks then look
like comes out as snapshots or as Flight Recorder dumps, for tests and benchmarks of the verdict.
"""

from __future__ import annotations

import enum
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from scout_core.decision.snapshots import Channel, GroupState, Operation, RankSnapshot


class Side(enum.Enum):
    """What goes wrong on a rank."""

    CPU = "cpu"  # the program enters nothing more; the device finishes what it has
    GPU = "gpu"  # the device fails: its completions are no longer noticed, the CPU stops soon after


class Fault(NamedTuple):
    """A fault at one operation of a rank's program."""

    rank: int
    side: Side
    at: int
    """Index into the rank's program."""


class Step(NamedTuple):
    """One operation of a rank's program."""

    name: str
    group: str
    sequence: int
    """Number of the collective in its group, or of the operation in its channel; from 1."""
    peer: int = -1
    """Global rank of the other end, for a send or receive."""

    @property
    def meeting(self) -> tuple[Any, ...]:
        """Equal for the operations that complete together, apart from the channel's direction."""
        return (self.group, self.sequence)


@dataclass(frozen=True)
class Job:
    """Degrees and length of a job; ranks are laid out with t fastest, then d, then p."""

    tensor: int = 4
    data: int = 2
    stages: int = 2
    micro_batches: int = 3
    layers: int = 2
    steps: int = 2

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.data * self.stages

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Members by name, in the order in which the groups are created."""
        t, d, p = self.tensor, self.data, self.stages
        grid = [[[(k * d + j) * t + i for i in range(t)] for j in range(d)] for k in range(p)]
        named: dict[str, tuple[int, ...]] = {"world": tuple(range(self.world_size))}
        for k in range(p):
            named |= {f"tp-{k}-{j}": tuple(grid[k][j]) for j in range(d)}
            named |= {f"dp-{k}-{i}": tuple(grid[k][j][i] for j in range(d)) for i in range(t)}
        for j in range(d):
            named |= {f"pp-{j}-{i}": tuple(grid[k][j][i] for k in range(p)) for i in range(t)}
        return named

    def program(self, rank: int) -> list[Step]:
        """What one rank does: all forwards, all backwards, gradients, then the norm."""
        i = rank % self.tensor
        j = rank // self.tensor % self.data
        k = rank // (self.tensor * self.data)
        stride = self.tensor * self.data
        writer = _Writer(rank, f"tp-{k}-{j}", f"dp-{k}-{i}", f"pp-{j}-{i}")
        before = rank - stride if k else None
        after = rank + stride if k < self.stages - 1 else None
        for _ in range(self.steps):
            for source, target in ((before, after), (after, before)):
                for _ in range(self.micro_batches):
                    writer.micro_batch(source, target, self.layers)
            writer.collective("reduce_scatter", writer.dp)
            writer.collective("all_reduce", "world")
        return writer.steps


class _Writer:
    def __init__(self, rank: int, tp: str, dp: str, pp: str) -> None:
        self.rank, self.tp, self.dp, self.pp = rank, tp, dp, pp
        self.steps: list[Step] = []
        self._counts: dict[tuple[str, int, str], int] = defaultdict(int)

    def collective(self, name: str, group: str) -> None:
        self._append(name, group, -1)

    def micro_batch(self, source: int | None, target: int | None, layers: int) -> None:
        if source is not None:
            self._append("recv", self.pp, source)
        for _ in range(layers):
            self._append("all_gather", self.tp, -1)
            self._append("reduce_scatter", self.tp, -1)
        if target is not None:
            self._append("send", self.pp, target)

    def _append(self, name: str, group: str, peer: int) -> None:
        key = (group, peer, name if peer >= 0 else "")
        self._counts[key] += 1
        self.steps.append(Step(name, group, self._counts[key], peer))


@dataclass(frozen=True)
class Stopped:
    """The job when nothing moves any more."""

    job: Job
    programs: list[list[Step]]
    """By rank."""
    entered: list[int]
    """By rank, how many operations its CPU has entered."""
    completed: list[int]
    """By rank, how many of them are known to be complete."""

    def snapshots(self) -> list[RankSnapshot]:
        """One snapshot per rank, as SCOUT's observer would give it."""
        return [self._snapshot(rank) for rank in range(self.job.world_size)]

    def _snapshot(self, rank: int) -> RankSnapshot:
        entered: dict[tuple[str, int, str], int] = {}
        completed: dict[tuple[str, int, str], int] = {}
        pending: dict[tuple[str, int, str], list[Operation]] = defaultdict(list)
        for index, step in enumerate(self.programs[rank][: self.entered[rank]]):
            key = (step.group, step.peer, step.name if step.peer >= 0 else "")
            entered[key] = step.sequence
            if index < self.completed[rank]:
                completed[key] = step.sequence
            else:
                pending[key].append(Operation(step.sequence, step.name, "bf16 x 8"))
        groups, channels = [], []
        for (name, peer, way), count in entered.items():
            key = (name, peer, way)
            done, listed = completed.get(key, 0), tuple(pending[key])
            if peer < 0:
                ranks = self.job.groups[name]
                groups.append(
                    GroupState(name, ranks, count, done, operations=listed, backend="nccl")
                )
            else:
                channels.append(Channel(name, peer, way == "send", count, done, listed, "nccl"))
        return RankSnapshot(
            rank,
            host=f"host-{rank // 8}",
            complete=("scout",),
            groups=tuple(groups),
            channels=tuple(channels),
        )


def run_until_stopped(job: Job, faults: Sequence[Fault], *, run_ahead: int = 6) -> Stopped:
    """Run a job until nothing moves any more; without faults that is its end.

    Args:
        faults: at most one per rank.
        run_ahead: operations that a CPU enters before its device has completed the first of them.
    """
    programs = [job.program(rank) for rank in range(job.world_size)]
    limit = [len(program) for program in programs]
    noticed = [len(program) for program in programs]
    for fault in faults:
        behind = run_ahead // 2 if fault.side is Side.GPU else 0
        limit[fault.rank] = fault.at
        noticed[fault.rank] = max(0, fault.at - behind) if behind else fault.at
    done = _run(job, programs, limit)
    entered = [min(limit[r], done[r] + run_ahead) for r in range(job.world_size)]
    completed = [min(done[r], noticed[r]) for r in range(job.world_size)]
    return Stopped(job, programs, entered, completed)


def _run(job: Job, programs: Sequence[Sequence[Step]], limit: Sequence[int]) -> list[int]:
    """Return by rank how many operations its device completes."""
    done = [0] * job.world_size
    waiting: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    ready = list(range(job.world_size))
    while ready:
        rank = ready.pop()
        if done[rank] >= limit[rank]:
            continue
        step = programs[rank][done[rank]]
        ends = (rank, step.peer) if step.name == "send" else (step.peer, rank)
        key = (*step.meeting, *ends) if step.peer >= 0 else step.meeting
        met = waiting[key]
        met.append(rank)
        if len(met) == (2 if step.peer >= 0 else len(job.groups[step.group])):
            for member in waiting.pop(key):
                done[member] += 1
                ready.append(member)
    return done


def random_faults(job: Job, rng: random.Random, count: int, side: Side) -> list[Fault]:
    """Draw faults that happen at the same place of the program on ranks of one stage.

    Ranks of one stage run equal programs, so none of them can be waiting for another's fault.
    """
    per_stage = job.tensor * job.data
    stage = rng.randrange(job.stages)
    ranks = rng.sample(range(stage * per_stage, (stage + 1) * per_stage), count)
    length = len(job.program(ranks[0]))
    at = rng.randrange(length // 4, length - 1)
    return [Fault(rank, side, at) for rank in sorted(ranks)]
