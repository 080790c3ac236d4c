"""Synthetic tables of timings, with or without something wrong, to try `scout postmortem` on.

The layout is that of `lab.timings`: one row per operation of one rank in one step. Pipeline stages,
data replicas and micro-batches are as in a real job; one rank per replica and stage.
"""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scout_core.errors import ScoutError

FORWARD_S = 0.070  # usual forward time of one micro-batch in one stage
BACKWARD = 2.0  # backward over forward time
TRANSFER_S = 0.020  # gradient reduction when nobody waits

Row = dict[str, Any]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TracePlan:
    """What happens in a synthetic job."""

    replicas: int = 4
    stages: int = 4
    micro_batches: int = 8
    steps: int = 24
    seed: int = 0
    noise: float = 0.01
    """Scatter of one operation's log duration."""
    data_noise: float = 0.015
    """The same for a micro-batch in all stages alike."""
    slow_workers: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Factor by (replica, stage)."""
    slow_from: int = 0
    """Number of the step from which on they are slow."""
    stage_work: Mapping[int, float] = field(default_factory=dict)
    """Factor by stage."""
    uneven_data: float = 0.0
    """Scatter of the log of a micro-batch's length."""
    pauses: float = 0.0
    """Probability that a worker's step has a pause in one forward pass."""
    pause_s: float = 0.2
    slowdown: float = 1.0
    """Factor on everything in the second half of the steps."""
    record_tokens: bool = False
    record_pauses: bool = False

    def __post_init__(self) -> None:
        sizes = (self.replicas, self.stages, self.micro_batches, self.steps)
        if min(sizes) < 1:
            raise ScoutError(f"a trace of {sizes} replicas, stages, micro-batches, steps is empty")


@dataclass(frozen=True)
class _Durations:
    """Seconds by (step, replica, stage, micro-batch), and (step, replica, stage) of pauses."""

    forward: Array
    backward: Array
    paused: Array
    tokens: Array


def simulate_trace(plan: TracePlan) -> list[Row]:
    """Return the rows of one synthetic job."""
    made = _durations(plan)
    busy = (made.forward + made.backward).sum(axis=3)
    reduce = TRANSFER_S + busy.max(axis=1, keepdims=True) - busy
    rows = []
    for step, replica, stage in np.ndindex(made.paused.shape):
        place = {
            "rank": stage * plan.replicas + replica,
            "dp_rank": replica,
            "stage": stage,
            "step": 10 + 3 * step,
        }
        at, clock = (step, replica, stage), 0.0
        for name, seconds in (("forward", made.forward[at]), ("backward", made.backward[at])):
            for batch, duration in enumerate(seconds.tolist()):
                row = _row(place, f"{name}-compute", clock, duration, batch)
                rows.append(
                    row | ({"tokens": float(made.tokens[at][batch])} if plan.record_tokens else {})
                )
                clock += duration
        rows.append(_row(place, "grads-reduce-scatter", clock, float(reduce[at])))
        if plan.record_pauses:
            rows.append(_row(place, "gc", 0.0, float(made.paused[at])))
    return rows


def _row(place: Row, operation: str, start: float, duration: float, batch: int = -1) -> Row:
    return {**place, "optype": operation, "start_ts": start, "duration": duration, "mb_id": batch}


def _durations(plan: TracePlan) -> _Durations:
    noise = np.random.default_rng(plan.seed)
    shape = (plan.steps, plan.replicas, plan.stages, plan.micro_batches)
    every_stage = (*shape[:2], 1, shape[3])
    lengths = np.exp(plan.uneven_data * noise.standard_normal(every_stage))
    usual = FORWARD_S * lengths * np.exp(plan.data_noise * noise.standard_normal(every_stage))
    usual = np.broadcast_to(usual, shape).copy()
    usual[plan.steps // 2 :] *= plan.slowdown
    for stage, factor in plan.stage_work.items():
        usual[:, :, stage] *= factor
    for (replica, stage), factor in plan.slow_workers.items():
        usual[plan.slow_from :, replica, stage] *= factor
    forward, backward = (
        usual * times * np.exp(plan.noise * noise.standard_normal(shape)) for times in (1, BACKWARD)
    )
    paused = np.where(noise.random(shape[:3]) < plan.pauses, plan.pause_s, 0.0)
    batch = noise.integers(plan.micro_batches, size=shape[:3])
    forward[(*np.indices(shape[:3]), batch)] += paused
    return _Durations(forward, backward, paused, np.broadcast_to(4096 * lengths, shape))


def write_trace(rows: list[Row], path: pathlib.Path) -> None:
    """Write rows as CSV, or as Parquet when the suffix says so."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
