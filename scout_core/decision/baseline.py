"""Temporal baseline: a group or a job that became slower than it was.

Comparing peers cannot see a whole group slow down together, because the median moves with it; the
paper says so and leaves the gap. This one-sided cumulative sum closes it. It never names a rank:
it says "this group needs longer than it did", and nothing about who is to blame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scout_core.decision.evidence import is_healthy_duration
from scout_core.errors import ScoutError

REFERENCE = 64  # healthy values that define "as it was"
LEARNING = 12  # values before anything is judged
ALLOWANCE = 0.5  # scales per check that are forgiven (k of the cumulative sum)
LIMIT = 8.0  # cumulative scales that mean "slower" (h)
ONE_CHECK = 4.0  # scales that one check can add, so that three checks must agree
SMALLEST_SCALE = 0.005  # of log time
LASTING = 8  # checks over which a wandering baseline is measured
RECENT = 3  # checks whose mean is the reported factor
NORMAL = 1.4826  # median absolute deviation -> standard deviation of a normal
SHORTEST_S = 1e-9  # a duration of 0 counts as one nanosecond
STATE_SCHEMA = "scout.slowdown/1"


class Slowdown(NamedTuple):
    """What the baseline says about one key."""

    slow: bool
    factor: float
    """Recent duration over the reference; 1 while the reference is being learned."""
    checks: int
    """Checks since the rise began; 0 when there is none."""


@dataclass
class _Baseline:
    """What the rule remembers of one key; times are log seconds."""

    reference: list[float] = field(default_factory=list)
    centre: float = 0.0
    scale: float = SMALLEST_SCALE
    recent: list[float] = field(default_factory=list)
    rise: float = 0.0
    """Cumulative sum, in scales."""
    checks: int = 0

    def learn(self, value: float) -> None:
        """Add a value to the reference."""
        self.reference.append(value)
        self.measure()

    def measure(self) -> None:
        """Take centre and scale from the reference."""
        values = np.array(self.reference)
        if len(values) >= LEARNING:
            self.centre = float(np.median(values))
            self.scale = max(SMALLEST_SCALE, _scale(values - self.centre))


class SlowdownRule:
    """Say when a duration rises above its own history, at once or gradually.

    A key is a process group, or the job. The first 64 values that are not part of a rise are the
    reference; it then stays as it is, so that a slow creep cannot take it along.
    """

    def __init__(self, dead_zone: float = 0.02) -> None:
        """Set the size of a rise that is forgiven.

        Args:
            dead_zone: a rise below this fraction is nobody's business.

        Raises:
            ScoutError: it is negative or not finite.
        """
        if not is_healthy_duration(dead_zone):
            raise ScoutError(f"dead_zone={dead_zone} of SlowdownRule must be a finite number >= 0")
        self.dead_zone = dead_zone
        self._baselines: dict[str, _Baseline] = {}

    def update(self, key: str, seconds: float) -> Slowdown:
        """Add one duration. One that is not finite or is negative changes nothing."""
        baseline = self._baselines.setdefault(key, _Baseline())
        if not is_healthy_duration(seconds):
            return _reading(baseline)
        value = math.log(max(seconds, SHORTEST_S))
        baseline.recent = [*baseline.recent, value][-RECENT:]
        if len(baseline.reference) >= LEARNING:
            self._accumulate(baseline, value)
        if len(baseline.reference) < REFERENCE and baseline.rise < LIMIT / 2:
            baseline.learn(round(value, 6))
        return _reading(baseline)

    def knows(self, key: str) -> bool:
        """Tell whether the reference of a key is long enough to judge by."""
        baseline = self._baselines.get(key)
        return baseline is not None and len(baseline.reference) >= LEARNING

    def forget(self, key: str) -> None:
        """Learn the reference of a key anew, after a change that is known and wanted."""
        self._baselines.pop(key, None)

    def state(self) -> dict[str, Any]:
        """Return everything the rule remembers, as JSON values."""
        keys = {
            key: {
                "reference": list(b.reference),
                "recent": list(b.recent),
                "rise": b.rise,
                "checks": b.checks,
            }
            for key, b in self._baselines.items()
        }
        return {"schema": STATE_SCHEMA, "keys": keys}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], dead_zone: float = 0.02) -> SlowdownRule:
        """Continue from what `state` returned.

        Raises:
            ScoutError: not such a state.
        """
        rule = cls(dead_zone)
        if state.get("schema") != STATE_SCHEMA:
            raise ScoutError(
                f"slowdown state has schema {state.get('schema')!r}, not {STATE_SCHEMA!r}; "
                "start without it"
            )
        try:
            for key, plain in state["keys"].items():
                baseline = rule._baselines[key] = _Baseline(
                    [float(value) for value in plain["reference"]],
                    recent=[float(value) for value in plain["recent"]],
                    rise=float(plain["rise"]),
                    checks=int(plain["checks"]),
                )
                baseline.measure()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScoutError(
                f"slowdown state cannot be read ({error!r}); start without it"
            ) from error
        return rule

    def _accumulate(self, baseline: _Baseline, value: float) -> None:
        excess = (value - baseline.centre - math.log1p(self.dead_zone)) / baseline.scale
        excess = min(excess, ONE_CHECK)
        baseline.rise = min(max(0.0, baseline.rise + excess - ALLOWANCE), 2 * LIMIT)
        baseline.checks = baseline.checks + 1 if baseline.rise > 0 else 0


def _scale(centred: npt.NDArray[np.float64]) -> float:
    """Scatter of the reference; more when it is short, or when deviations last over many checks.

    The sum of checks that deviate together grows faster than that of independent ones, so the mean
    of 8 checks says how much a wandering baseline may add up.
    """
    scatter = NORMAL * float(np.median(np.abs(centred)))
    scatter *= 1 + LEARNING / (2 * len(centred))
    if len(centred) < 3 * LASTING:
        return scatter
    sums = np.cumsum(np.concatenate([[0.0], centred]))
    means = (sums[LASTING:] - sums[:-LASTING]) / LASTING
    return max(scatter, float(np.std(means)) * math.sqrt(LASTING))


def _reading(baseline: _Baseline) -> Slowdown:
    if len(baseline.reference) < LEARNING:
        return Slowdown(False, 1.0, 0)
    change = sum(baseline.recent) / len(baseline.recent) - baseline.centre
    return Slowdown(baseline.rise > LIMIT, math.exp(change), baseline.checks)
