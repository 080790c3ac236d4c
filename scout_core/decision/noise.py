"""How much the time for the same work scatters when nothing is wrong.

# Note [Scale]
The scale is the median absolute deviation of z over the last 64 clean checks, each rank about its
own median: a rank that is slow all the time has an offset, not a scatter, and cannot hide in the
scale, not even when it was slow from the first check on. Until there is history, a prior of 3 %
stands in, and 10 % at first. A check that looks suspicious waits: it joins the history when it has
left the window of three, without the ranks that were blamed meanwhile, so that a straggler never
counts as noise but ranks that became noisy do. Noise that doubles is believed before it fills the
history (`noise_of`, `window_scale`), and noise that lasts over several checks is not averaged away
(`_persistence`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 3  # checks that are judged together
HISTORY = 64  # clean checks whose scatter is the scale
PRIOR_SCALE = 0.03  # of log time; stands in until there is history
PRIOR_CHECKS = 3  # weight of the prior
COLD_SCALE = 0.10  # the least that is believed before COLD_CHECKS clean checks were seen:
COLD_CHECKS = 6  # a job on busy machines would be accused by the prior alone
NORMAL = 1.4826  # median absolute deviation -> standard deviation of a normal
RECENT = 12  # clean checks that show whether the ranks became noisier
NOISIER = 2.0  # times the usual scale: beyond this the new one is believed
PERSISTENCE_CHECKS = 16  # history needed to see that noise lasts
LASTING = 1.5  # persistence up to here is within what independent checks show by chance

Array = npt.NDArray[Any]


@dataclass
class Check:
    """One check of a recipe: z of each finite rank. `ranks` and `z` have the same order."""

    ranks: tuple[int, ...]
    z: Array
    pooled: bool = False
    """It is part of the history."""
    blamed: frozenset[int] = frozenset()
    """Global ranks blamed while it was in the window: theirs never becomes part of the history."""


@dataclass(frozen=True)
class Noise:
    """How much z of a healthy rank scatters."""

    scale: float
    persistence: float
    """1 for independent checks, sqrt(WINDOW) for noise that lasts longer than the window."""
    offsets: Array
    """(N,) median z of each rank."""

    @property
    def of_mean(self) -> float:
        """Scale of the mean over a window."""
        return self.scale * min(self.persistence, math.sqrt(WINDOW)) / math.sqrt(WINDOW)


def noise_of(history: Sequence[Check], ranks: tuple[int, ...]) -> Noise:
    """Estimate the scatter of these ranks from the clean history; see Note [Scale]."""
    z = matrix_of(history, ranks)
    offsets = medians_of(z)
    z = z[~np.isnan(z).all(axis=1)] - offsets
    checks = len(z)
    if checks < 2:
        return Noise(COLD_SCALE, 1.0, offsets)
    correction = NORMAL * math.sqrt(checks / (checks - 1))
    measured, recent = (
        correction * float(np.median(np.abs(part[~np.isnan(part)]))) for part in (z, z[-RECENT:])
    )
    measured = recent if recent > NOISIER * measured else measured
    prior = PRIOR_CHECKS * PRIOR_SCALE**2
    scale = math.sqrt((prior + (checks - 1) * measured**2) / (PRIOR_CHECKS + checks - 1))
    least = COLD_SCALE if checks < COLD_CHECKS else 0.0
    return Noise(max(scale, least), _persistence(z, measured), offsets)


def _persistence(centred: Array, scale: float) -> float:
    """How much more the mean of a window scatters than independent checks would; >= 1."""
    if len(centred) < PERSISTENCE_CHECKS or scale == 0:
        return 1.0
    means = np.lib.stride_tricks.sliding_window_view(centred, WINDOW, axis=0).mean(axis=-1)
    means = means[~np.isnan(means)]
    if not len(means):
        return 1.0
    persistence = NORMAL * float(np.median(np.abs(means))) * math.sqrt(WINDOW) / scale
    return persistence if persistence > LASTING else 1.0


def window_scale(healthy: Array, usual: float) -> float:
    """Scatter that the (checks, ranks) z of presumably healthy ranks show in the window itself.

    Few values are a poor estimate, so up to twice the usual scale its lower bound counts.
    """
    healthy = healthy[:, ~np.isnan(healthy).any(axis=0)]
    freedom = healthy.shape[0] * (healthy.shape[1] - 1)
    if freedom < 1:
        return 0.0
    scale = math.sqrt(healthy.var(axis=1, ddof=1).mean())
    return scale if scale > NOISIER * usual else scale / (1 + 2 / math.sqrt(2 * freedom))


def matrix_of(checks: Sequence[Check], ranks: tuple[int, ...]) -> Array:
    """(checks, N) z of these ranks; NaN where a rank was not timed."""
    if checks and all(check.ranks == ranks for check in checks):
        return np.array([check.z for check in checks])
    column = {rank: i for i, rank in enumerate(ranks)}
    matrix = np.full((len(checks), len(ranks)), np.nan)
    for row, check in zip(matrix, checks, strict=True):
        known = [i for i, rank in enumerate(check.ranks) if rank in column]
        row[[column[check.ranks[i]] for i in known]] = check.z[known]
    return matrix


def medians_of(matrix: Array) -> Array:
    """(N,) median of the values that each column has; 0 where it has none."""
    if len(matrix) and not np.isnan(matrix).any():
        medians: Array = np.median(matrix, axis=0)
        return medians
    columns = (column[~np.isnan(column)] for column in matrix.T)
    return np.array([np.median(values) if len(values) else 0.0 for values in columns])
