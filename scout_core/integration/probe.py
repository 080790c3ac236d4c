"""Active probe of communication: one small timed collective per process group.

Groups of one kind do not overlap, so they are timed together, wave after wave; groups that overlap
are never timed at the same time. Each timing starts after a barrier of its group, so that waiting
for a late member does not count. SCOUT's own groups are used, never the training communicator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from scout_core.config import ScoutConfig
from scout_core.decision import alltoall_verdict, localize_incident, rotation
from scout_core.decision.alltoall_verdict import Exchanged, Pair
from scout_core.decision.communication import LEAST_LOSS_S, CommunicationRule, GroupTiming
from scout_core.decision.labels import Outcome
from scout_core.decision.topology import LayoutName, Topology
from scout_core.errors import ScoutError
from scout_core.evidence import collectives
from scout_core.evidence.capture import Undo
from scout_core.evidence.clock import Clock
from scout_core.evidence.exchange import Exchange, Ranks
from scout_core.integration.alltoall_replay import AllToAllReplay, AllToAllWatch, Seen
from scout_core.integration.checker import Told
from scout_core.integration.ledger import stamped
from scout_core.report.events import now

REPEATS = 3  # the fastest counts
LEAST_LOSS_ON_CPU_S = 2e-3  # ranks wait that long for a core of their machine
MAX_ROUNDS = 12  # probes in a row while a slow group is not confirmed yet
PROBE = "probe"  # what shows a slow link or machine, and later clears it
ALL_TO_ALL_KINDS = {"d": "dp", "s": "fsdp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
NOTHING = Seen(None)


class Wave(NamedTuple):
    """Groups of one kind that are disjoint: they are timed at the same time."""

    kind: str
    groups: tuple[Ranks, ...]

    def of(self, rank: int) -> Ranks | None:
        """The group that a rank is in."""
        return next((group for group in self.groups if rank in group), None)


class Probe:
    """Times all groups of the job in one round, and explains what is slow.

    A group that runs an all-to-all in training is timed by a replay of that, whose payload is
    checked; any other by a reduction. The two have other names for their kind: their times are not
    compared.
    """

    name = PROBE

    def __init__(
        self,
        exchange: Exchange,
        clock: Clock,
        topology: Topology,
        devices: Mapping[int, str],
        config: ScoutConfig,
        device: torch.device,
        slow_ranks: Callable[[], Collection[int]],
    ) -> None:
        """Join the groups of this rank and watch for all-to-alls; collective.

        Args:
            devices: name by global rank, for reports.
            device: where the payload lives.
            slow_ranks: ranks known to compute slowly: their groups are late, not slow.
        """
        self._exchange = exchange
        self._clock = clock
        self._topology = topology
        self._devices = devices
        self._device = device
        self._slow_ranks = slow_ranks
        self._config = config
        self._elements = max(1, config.communication.probe_bytes // 4)
        self._least_loss_s = LEAST_LOSS_ON_CPU_S if device.type == "cpu" else LEAST_LOSS_S
        self.rule = CommunicationRule(topology, config.kappa, self._least_loss_s)
        """What is remembered between rounds."""
        self.waves = waves_of(topology)
        for wave in self.waves:
            group = wave.of(exchange.rank)
            exchange.join([group] if group is not None else [])
        self._everyone = tuple(range(exchange.world_size))
        self._known = {group for wave in self.waves for group in wave.groups}
        self._rounds = 0
        self._said: set[str] = set()
        watch = AllToAllWatch()
        bound = config.communication.probe_bytes
        self._alltoall = AllToAllReplay(exchange, clock, watch, bound)
        self._undo: Undo | None = None
        self._lost = ""
        if exchanges_inside(topology):
            self._observe(watch)

    def close(self) -> None:
        """Stop watching."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _observe(self, watch: AllToAllWatch) -> None:
        try:
            self._undo = collectives.observe(watch)
        except ScoutError as error:
            self._lost = f"all-to-alls are not replayed: {error}"

    def state(self) -> dict[str, Any]:
        """Return what is remembered between rounds, as JSON values."""
        return self.rule.state()

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises:
            ScoutError: not such a state.
        """
        kappa, least_loss_s = self._config.kappa, self._least_loss_s
        self.rule = CommunicationRule.from_state(state, self._topology, kappa, least_loss_s)

    def on_step_end(self, step: int) -> Told | None:
        """Time every group when it is due, and again while a slow one is not confirmed yet."""
        interval = self._config.communication.probe_interval_steps
        return self.run(step) if self._rounds or rotation.is_due(step, interval) else None

    def run(self, step: int) -> Told:
        """Time every group once and judge; collective over the job."""
        device = self._device
        self._alltoall.agree()
        told = [json.loads(part) for part in self._gathered(device)]
        timings = list(_timings(self.waves, [each["seconds"] for each in told], self._replayed))
        seen = self.rule.update(timings, compute_stragglers=self._slow_ranks())
        again = not seen.settled and self._rounds < MAX_ROUNDS
        self._rounds = self._rounds + 1 if again else 0
        found = localize_incident.to_incidents(
            seen.diagnosis, self._topology, step=step, slowdowns=seen.slowdowns
        )
        damaged = self._confirmed([each["damaged"] for each in told], device)
        found += alltoall_verdict.to_incidents(damaged, self._topology, self._devices, step)
        time = told[0]["time"]
        return Told(
            PROBE,
            Outcome.SDC if damaged else Outcome.CLEAN,
            tuple(stamped(incident, self._config.job, time) for incident in found),
            frozenset([PROBE] if seen.settled else ()),
            self._remarks({each["refused"] for each in told} - {""}),
            completes=False,
        )

    def _gathered(self, device: torch.device) -> list[bytes]:
        payload = torch.zeros(self._elements, dtype=torch.float32, device=device)
        mine: list[Seen] = []
        for wave in self.waves:
            group = wave.of(self._exchange.rank)
            mine.append(NOTHING if group is None else self._time(group, payload))
            self._exchange.barrier(self._everyone)  # the next wave may overlap this one
        part = {
            "time": now(),
            "seconds": [seen.seconds for seen in mine],
            "damaged": [pair for seen in mine for pair in seen.damaged],
            "refused": next((seen.refused for seen in mine if seen.refused), self._lost),
        }
        return self._exchange.all_gather(json.dumps(part).encode(), self._everyone)

    def _time(self, group: Ranks, payload: torch.Tensor) -> Seen:
        if group in self._replayed:
            return self._alltoall.run(group, payload.device, REPEATS)
        times = []
        for _ in range(REPEATS):
            self._exchange.barrier(group)
            timing = self._clock.measure(lambda: self._exchange.reduce(payload, group))
            times.append(timing.wall_s)
        return Seen(min(times))

    @property
    def _replayed(self) -> frozenset[Ranks]:
        return frozenset(group for group in self._alltoall.groups if group in self._known)

    def _remarks(self, refused: set[str]) -> tuple[str, ...]:
        """Say once what cannot be replayed."""
        odd = [list(group) for group in self._alltoall.groups if group not in self._known]
        if odd:
            refused.add(f"all-to-alls among ranks {odd} are not replayed: no known parallel group")
        new = tuple(sorted(refused - self._said))
        self._said |= refused
        return new

    def _confirmed(
        self, told: Sequence[Sequence[Sequence[int]]], device: torch.device
    ) -> list[Exchanged]:
        """Repeat the damaged groups' all-to-alls with everyone sending to everyone."""
        pairs = {(sender, receiver) for damaged in told for sender, receiver in damaged}
        suspects = [
            group
            for group in sorted(self._replayed)
            if any(set(pair) <= set(group) for pair in pairs)
        ]
        found = {group: [{p for p in pairs if set(p) <= set(group)}] for group in suspects}
        for _ in range(self._config.confirm_repeats if suspects else 0):
            mine: list[Pair] = []
            for group in suspects:
                if self._exchange.rank in group:
                    mine += self._alltoall.run(group, device, 1, balanced=True).damaged
            parts = self._exchange.all_gather(json.dumps(mine).encode(), self._everyone)
            again = {(a, b) for part in parts for a, b in json.loads(part)}
            for group in suspects:
                found[group].append({p for p in again if set(p) <= set(group)})
        return [
            Exchanged(
                group,
                frozenset().union(*damaged),
                len(damaged) - 1,
                sum(map(bool, damaged[1:])),
            )
            for group, damaged in found.items()
        ]


def exchanges_inside(topology: Topology) -> bool:
    """Tell whether layers may exchange tokens or sequences, so that there are all-to-alls."""
    return any(len(row) > 1 for row in topology.rows)


def _timings(
    waves: Sequence[Wave], seconds: Sequence[Sequence[float | None]], replayed: Collection[Ranks]
) -> Iterator[GroupTiming]:
    for number, wave in enumerate(waves):
        for group in wave.groups:
            told = {rank: seconds[rank][number] for rank in group}
            known = {rank: value for rank, value in told.items() if value is not None}
            kind = ALL_TO_ALL_KINDS[wave.kind] if group in replayed else wave.kind
            yield GroupTiming(group, kind, known)


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
