"""Live causes of slowness in which no rank is at fault: uneven stages or data, pauses, loading.

All ranks time their own work over the same window of steps, tell each other at its end, and come to
the same explanation. Who computes slowly is told by replays, which do the same work on every rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scout_core.config import ScoutConfig
from scout_core.decision import imbalance_incident
from scout_core.decision.imbalance import Cause, Explanation, explain
from scout_core.decision.incident import Incident
from scout_core.decision.labels import Outcome
from scout_core.decision.topology import Topology
from scout_core.decision.work import Array, Work, Worker
from scout_core.evidence.exchange import Exchange
from scout_core.evidence.work_clock import StepWork, WorkClock
from scout_core.integration.checker import Told
from scout_core.integration.framework import Framework
from scout_core.integration.ledger import stamped
from scout_core.report.events import now

WINDOW_STEPS = 12
WORKLOAD = "workload"  # what shows an imbalance, and later clears it
STEP_PER_FORWARD = 3.0  # a backward pass costs about two forward passes
NOBODYS_FAULT = (Cause.STAGE, Cause.DATA, Cause.PAUSES, Cause.LOADING, Cause.ROTATING)
TIMED_ROLES = ("embedding", "hidden", "head")  # these do not contain one another


class Workload:
    """Measures the last steps before every `interval_steps`-th one."""

    name = WORKLOAD

    def __init__(
        self,
        exchange: Exchange,
        topology: Topology,
        framework: Framework,
        config: ScoutConfig,
    ) -> None:
        """Measure nothing yet."""
        self._exchange = exchange
        self._workers = workers_of(topology)
        self._hosts = dict(enumerate(topology.hosts))
        self._interval = config.workload.interval_steps
        self._window = min(WINDOW_STEPS, self._interval)
        self._job = config.job
        modules = [s.module for s in framework.sites() if s.role in TIMED_ROLES]
        self._clock = WorkClock(modules, framework.device)
        self._waits_first = any(framework.is_sharded(module) for module in modules)
        self._seen: frozenset[Cause] = frozenset()

    def state(self) -> dict[str, Any]:
        """Return what the last window showed, as JSON values."""
        return {"seen": sorted(cause.value for cause in self._seen)}

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._seen = frozenset(map(Cause, state["seen"]))

    def on_step_end(self, step: int) -> Told | None:
        """Go on measuring, or judge when a window ends; collective over the job then."""
        told = None
        done = step % self._interval == 0
        if self._clock.is_open and done:
            told = self._judge(step)
        elif self._clock.is_open:
            self._clock.next_step()
        if not self._clock.is_open and (step + self._window) % self._interval == 0:
            self._clock.open()
        return told

    def close(self) -> None:
        """Stop measuring."""
        self._clock.drop()

    def _judge(self, step: int) -> Told:
        part: dict[str, Any] = {"time": now(), "steps": [], "broken": ""}
        try:
            part["steps"] = self._clock.close()
        except Exception as error:  # noqa: BLE001 -- guard: the peers must be told, not left alone
            part["broken"] = repr(error)[:500]
        everyone = tuple(range(self._exchange.world_size))
        told = self._exchange.all_gather(json.dumps(part).encode(), everyone)
        parts = [json.loads(each) for each in told]
        broken = next((str(part["broken"]) for part in parts if part["broken"]), "")
        if broken:
            return Told(WORKLOAD, Outcome.INCONCLUSIVE, broken=broken, completes=False)
        by_rank = [[StepWork(*each) for each in part["steps"]] for part in parts]
        work = work_of(self._workers, step, by_rank, self._waits_first)
        found = [] if work is None else [e for e in explain(work) if e.cause in NOBODYS_FAULT]
        sure = self._confirmed(found)
        incidents = () if work is None else tuple(self._report(e, work, step) for e in sure)
        time = parts[0]["time"]
        return Told(
            WORKLOAD,
            Outcome.CLEAN,
            tuple(stamped(incident, self._job, time) for incident in incidents),
            frozenset([WORKLOAD]),
            completes=False,
        )

    def _confirmed(self, found: Sequence[Explanation]) -> list[Explanation]:
        """Only what two windows in a row show."""
        before, self._seen = self._seen, frozenset(each.cause for each in found)
        return [each for each in found if each.cause in before]

    def _report(self, found: Explanation, work: Work, step: int) -> Incident:
        return imbalance_incident.to_incident(found, work, hosts=self._hosts, step=step)


def workers_of(topology: Topology) -> tuple[Worker, ...]:
    """Return each rank's replica (who shares its micro-batches) and stage."""
    data = [(place.d, place.s, place.c) for place in topology.dense]
    replicas = {place: number for number, place in enumerate(sorted(set(data)))}
    return tuple(
        Worker(rank, replicas[data[rank]], place.p) for rank, place in enumerate(topology.dense)
    )


def work_of(
    workers: tuple[Worker, ...],
    last_step: int,
    by_rank: Sequence[Sequence[StepWork]],
    waits_first: bool,
) -> Work | None:
    """Put together what all ranks measured; None when some rank measured no step whole.

    Args:
        last_step: step with which the window ended.
        by_rank: steps of each rank, oldest first, in rank order.
        waits_first: a first forward pass waits for the other ranks, because parameters are sharded;
            then only the rank that came last did not wait, and its time counts for all.
    """
    num_steps = min(len(steps) for steps in by_rank)
    batches = [len(step.seconds) for steps in by_rank for step in steps]
    if num_steps == 0 or min(batches) == 0:
        return None
    shape = (num_steps, len(workers), max(batches))
    seconds, tokens = np.full(shape, math.nan), np.full(shape, math.nan)
    paused, wall = np.zeros(shape[:2]), np.zeros(shape[:2])
    loading = np.full(shape[:2], math.nan)
    for rank, steps in enumerate(by_rank):
        for i, each in enumerate(steps[-num_steps:]):
            seconds[i, rank, : len(each.seconds)] = each.seconds
            tokens[i, rank, : len(each.tokens)] = each.tokens
            paused[i, rank], wall[i, rank] = each.paused_s, each.wall_s
            if workers[rank].stage == 0:  # later stages wait for activations
                loading[i, rank] = each.loading_s
    if waits_first:
        loading[:] = np.nanmin(loading, axis=1, keepdims=True)
    known: Array | None = tokens if np.nanmin(tokens) > 0 else None
    return Work(
        workers,
        tuple(range(last_step - num_steps + 1, last_step + 1)),
        ("forward",),
        seconds[:, :, None, :] * STEP_PER_FORWARD,
        known,
        paused,
        loading,
        wall,
    )
