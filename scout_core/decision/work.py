"""Timed work of a job as one array, and what each duration is made of.

# Note [Parts]
A duration is taken to be a product: what its stage's work takes (`base`), what its micro-batch is
worth (`data`) and what its worker and chance add (`rest`). A micro-batch passes through all
stages of its replica, forward and backward, so what is common to them is the data's; a slow worker,
or a pause, slows one stage only. Token counts, where given, say the same directly. Without both
(one stage, or replicas that are not known), data and worker cannot be told apart in one duration,
and `data` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scout_core.errors import ScoutError

Array = npt.NDArray[Any]

SHORTEST_S = 1e-9  # a duration of 0 counts as one nanosecond
EXPLAINED = 0.8  # correlation from which one quantity explains another


class Worker(NamedTuple):
    """One rank that was timed, and its place in the grid."""

    rank: int  # global rank
    replica: int = 0
    stage: int = 0


@dataclass(frozen=True)
class Work:
    """Seconds of S steps, W workers, K operations, M micro-batches; NaN where nothing ran."""

    workers: tuple[Worker, ...]
    steps: tuple[int, ...]
    """Ascending optimizer steps; gaps are allowed."""
    operations: tuple[str, ...]
    seconds: Array
    """(S, W, K, M) compute time, without waiting for other ranks."""
    tokens: Array | None = None
    """(S, W, M) tokens of each micro-batch."""
    pauses_s: Array | None = None
    """(S, W) measured pauses of the interpreter (garbage collection)."""
    loading_s: Array | None = None
    """(S, W) time spent waiting for data; NaN where that is not known."""
    wall_s: Array | None = None
    """(S, W) duration of the whole step; None where only the work was timed."""

    def __post_init__(self) -> None:
        shape = (len(self.steps), len(self.workers), len(self.operations))
        if self.seconds.ndim != 4 or self.seconds.shape[:3] != shape or not self.seconds.size:
            raise ScoutError(
                f"work has {shape} steps, workers, operations, but seconds of shape "
                f"{self.seconds.shape}; it needs one more axis, for micro-batches, and no empty one"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """Pipeline stages that occur, ascending."""
        return tuple(sorted({worker.stage for worker in self.workers}))

    @property
    def replicas(self) -> tuple[int, ...]:
        """Data replicas that occur, ascending."""
        return tuple(sorted({worker.replica for worker in self.workers}))

    def of_stage(self, stage: int) -> list[int]:
        """Positions in `workers` of one stage."""
        return [i for i, worker in enumerate(self.workers) if worker.stage == stage]

    def of_replica(self, replica: int) -> list[int]:
        """Positions in `workers` of one replica."""
        return [i for i, worker in enumerate(self.workers) if worker.replica == replica]

    @cached_property
    def broken(self) -> Array:
        """(S, W) True where a duration was infinite or negative: never healthy."""
        return np.asarray((np.isinf(self.seconds) | (self.seconds < 0)).any(axis=(2, 3)))


@dataclass(frozen=True)
class Parts:
    """Note [Parts]: log(seconds) = base + data + rest."""

    base: Array
    """(W, K) log seconds that the work of the worker's stage takes."""
    data: Array
    """(S, W, M) log factor of the micro-batch; 0 where it cannot be told."""
    rest: Array
    """(S, W, K, M) log factor of the worker and of chance."""
    source: str
    """What the data's part was taken from: "tokens", "stages" or ""."""


def split(work: Work) -> Parts:
    """Take the durations apart."""
    usable = np.isfinite(work.seconds) & (work.seconds >= 0)
    logs = np.log(np.maximum(np.where(usable, work.seconds, np.nan), SHORTEST_S))
    base = np.zeros((len(work.workers), len(work.operations)))
    for stage in work.stages:
        members = work.of_stage(stage)
        base[members] = _stage_base(logs[:, members])
    deviation = logs - base[None, :, :, None]
    data, source = _data(work, deviation)
    return Parts(base, data, deviation - data[:, :, None], source)


def offsets(parts: Parts) -> Array:
    """(W, K) median over steps and micro-batches of a worker's own log factor."""
    together = np.moveaxis(parts.rest, 0, 2).reshape(*parts.rest.shape[1:3], -1)
    return np.nan_to_num(median(together, axis=2))


def common_to_operations(parts: Parts) -> Array:
    """(S, W, M) what all operations of a micro-batch share on a worker, beside `data`."""
    return np.nan_to_num(low_median(parts.rest, axis=2))


def median(values: Array, axis: int) -> Array:
    """Median of the values that are not NaN; NaN where there is none."""
    return (_order(values, axis, upper=False) + _order(values, axis, upper=True)) / 2


def low_median(values: Array, axis: int) -> Array:
    """Lower median of the values that are not NaN: with two, the smaller one."""
    return _order(values, axis, upper=False)


def correlation(x: Array, y: Array) -> float:
    """Correlation of two arrays of a shape, over the places where both are known; 0 if none."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _order(values: Array, axis: int, upper: bool) -> Array:
    ascending = np.sort(values, axis=axis)
    count = np.isfinite(ascending).sum(axis=axis, keepdims=True)
    place = np.maximum(count // 2 if upper else (count - 1) // 2, 0)
    chosen: Array = np.take_along_axis(ascending, place, axis=axis)
    return np.squeeze(chosen, axis=axis)


def _stage_base(logs: Array) -> Array:
    """(K,) from the (S, N, K, M) logs of one stage: the lower median of its workers' medians."""
    together = np.moveaxis(logs, 0, 2).reshape(*logs.shape[1:3], -1)
    return np.nan_to_num(low_median(median(together, axis=2), axis=0))


def _data(work: Work, deviation: Array) -> tuple[Array, str]:
    shape = (deviation.shape[0], deviation.shape[1], deviation.shape[3])
    per_worker = median(deviation, axis=2)
    if work.tokens is not None:
        explained = _from_tokens(work.tokens, per_worker)
        if explained is not None:
            return explained, "tokens"
    if any(len({work.workers[i].stage for i in work.of_replica(r)}) < 2 for r in work.replicas):
        return np.zeros(shape), ""
    data = np.zeros(shape)
    shared = low_median(deviation, axis=2)
    for replica in work.replicas:
        members = work.of_replica(replica)
        data[:, members] = np.nan_to_num(low_median(shared[:, members], axis=1))[:, None]
    return data, "stages"


def _from_tokens(tokens: Array, deviation: Array) -> Array | None:
    """Fit deviation = slope * log(tokens), each worker about its own median; None if it fails."""
    logs = np.log(np.where(tokens > 0, tokens, np.nan))
    x, y = (_about_own_median(values) for values in (logs, deviation))
    if correlation(x, y) < EXPLAINED:
        return None
    known = np.isfinite(x) & np.isfinite(y)
    slope = float((x[known] * y[known]).sum() / (x[known] ** 2).sum())
    return np.asarray(slope * np.nan_to_num(logs - np.nanmedian(logs)))


def _about_own_median(values: Array) -> Array:
    """(S, W, M) minus the median of each worker."""
    flat = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)
    return values - median(flat, axis=1)[None, :, None]
