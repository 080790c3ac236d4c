"""Active probe of communication: one small timed collective per process group (SPEC section 4).

Groups of one kind do not overlap, so they are timed together, wave after wave; groups that overlap
are never timed at the same time. Each timing starts after a barrier of its group, so that waiting
for a late member does not count. SCOUT's own groups are used, never the training communicator.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from scout_core.decision.communication import CommunicationCheck, CommunicationRule, GroupTiming
from scout_core.decision.topology import LayoutName, Topology
from scout_core.evidence.clock import Clock
from scout_core.evidence.exchange import Exchange, Ranks
from scout_core.report.events import now

REPEATS = 3  # the fastest counts
MAX_ROUNDS = 12  # probes in a row while a slow group is not confirmed yet


class Wave(NamedTuple):
    """Groups of one kind that are disjoint: they are timed at the same time."""

    kind: str
    groups: tuple[Ranks, ...]

    def of(self, rank: int) -> Ranks | None:
        """The group that a rank is in."""
        return next((group for group in self.groups if rank in group), None)


class Probe:
    """Times all groups of the job in one round, and explains what is slow."""

    def __init__(
        self, exchange: Exchange, clock: Clock, topology: Topology, size_bytes: int, kappa: float
    ) -> None:
        """Join the groups of this rank; collective."""
        self._exchange = exchange
        self._clock = clock
        self._elements = max(1, size_bytes // 4)
        self.rule = CommunicationRule(topology, kappa)
        """What is remembered between rounds."""
        self.waves = waves_of(topology)
        for wave in self.waves:
            group = wave.of(exchange.rank)
            exchange.join([group] if group is not None else [])
        self._everyone = tuple(range(exchange.world_size))

    def run(
        self, device: torch.device, compute_stragglers: Collection[int]
    ) -> tuple[CommunicationCheck, str]:
        """Time every group once and judge; collective over the job.

        Args:
            device: where the payload lives.
            compute_stragglers: ranks known to compute slowly: their groups are late, not slow.

        Returns:
            What was found, and the time of rank 0, for reports that are equal everywhere.
        """
        payload = torch.zeros(self._elements, dtype=torch.float32, device=device)
        mine: list[float | None] = []
        for wave in self.waves:
            group = wave.of(self._exchange.rank)
            mine.append(None if group is None else self._time(group, payload))
            self._exchange.barrier(self._everyone)  # the next wave may overlap this one
        payload_bytes = json.dumps([now(), mine]).encode()
        told = [json.loads(p) for p in self._exchange.all_gather(payload_bytes, self._everyone)]
        timings = list(_timings(self.waves, [seconds for _, seconds in told]))
        return self.rule.update(timings, compute_stragglers=compute_stragglers), told[0][0]

    def _time(self, group: Ranks, payload: torch.Tensor) -> float:
        times = []
        for _ in range(REPEATS):
            self._exchange.barrier(group)
            timing = self._clock.measure(lambda: self._exchange.reduce(payload, group))
            times.append(timing.wall_s)
        return min(times)


def _timings(
    waves: Sequence[Wave], seconds: Sequence[Sequence[float | None]]
) -> Iterator[GroupTiming]:
    for number, wave in enumerate(waves):
        for group in wave.groups:
            told = {rank: seconds[rank][number] for rank in group}
            known = {rank: value for rank, value in told.items() if value is not None}
            yield GroupTiming(group, wave.kind, known)


def waves_of(topology: Topology) -> tuple[Wave, ...]:
    """List every parallel group of the job, in waves of disjoint groups of one kind.

    Data, shard, tensor, context and expert groups as they are; pipeline stages as pairs of
    neighbours, even pairs before odd ones. Groups of the same ranks are timed once.
    """
    seen: set[Ranks] = set()
    waves = []
    axes: list[tuple[str, LayoutName]] = [("t", "dense"), ("s", "dense"), ("d", "dense")]
    axes += [("c", "dense"), ("e", "expert")]
    for axis, layout in axes:
        groups = topology.axis_groups(axis, layout)
        waves.append(_wave(axis, groups, seen))
    chains = topology.axis_groups("p")
    for first in (0, 1):
        pairs = [
            tuple(sorted(chain[i : i + 2]))
            for chain in chains
            for i in range(first, len(chain) - 1, 2)
        ]
        waves.append(_wave("p", pairs, seen))
    return tuple(wave for wave in waves if wave.groups)


def _wave(kind: str, groups: Sequence[Ranks], seen: set[Ranks]) -> Wave:
    fresh = tuple(group for group in groups if len(group) > 1 and group not in seen)
    seen.update(fresh)
    return Wave(kind, fresh)
