"""Simulated timings: how often a straggler rule is wrong, and how fast it is right.

Everything is seeded numpy; no process, no clock. The rules are the product's own, not copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scout_core.decision.consensus import Status, Verdict, statistical
from scout_core.decision.noise import HISTORY
from scout_core.decision.straggler import StragglerRule
from scout_core.errors import ScoutError

NoiseKind = Literal["gauss", "heavy", "hiccup", "wander"]
RuleName = Literal["scout", "paper", "fixed"]
NOISES: tuple[NoiseKind, ...] = ("gauss", "heavy", "hiccup", "wander")
RULES: tuple[RuleName, ...] = ("scout", "paper", "fixed")

WORK_S = 0.01  # usual duration of the timed work
HEAVY_FREEDOM = 3  # degrees of freedom of the heavy-tailed noise
HICCUP_CHANCE = 0.02  # of one timing
HICCUP = 0.5  # mean of a hiccup's log factor
MEMORY = 0.9  # correlation of wandering noise from check to check
FIXED = 1.10  # the naive rule: so many times the median is slow
WITHIN = (3, 5)  # checks within which detection is counted
TRIALS_PER_HISTORY = 10  # trials that start from the same clean history

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """How the time for the same work scatters."""

    kind: NoiseKind
    scatter: float
    """Standard deviation of the log of one timing, hiccups left out."""
    repeats: int = 5
    """Timings of one check, of which the fastest counts."""

    def __post_init__(self) -> None:
        if self.kind not in NOISES:
            raise ScoutError(f"noise {self.kind!r} is unknown; use one of {', '.join(NOISES)}")
        if not 0 < self.scatter < 1 or self.repeats < 1:
            raise ScoutError(
                f"noise with scatter {self.scatter} and {self.repeats} repeats: "
                "scatter must be between 0 and 1, repeats at least 1"
            )

    def checks(self, count: int, peers: int, rng: np.random.Generator) -> Array:
        """(count, peers) seconds of healthy ranks."""
        shape = (count, self.repeats, peers)
        if self.kind == "wander":
            return np.asarray(WORK_S * np.exp(self._wander(rng.normal(size=(count, peers)))))
        if self.kind == "heavy":
            logs = rng.standard_t(HEAVY_FREEDOM, shape) * self.scatter
            logs *= np.sqrt((HEAVY_FREEDOM - 2) / HEAVY_FREEDOM)
        else:
            logs = rng.normal(0.0, self.scatter, shape)
        if self.kind == "hiccup":
            logs += (rng.random(shape) < HICCUP_CHANCE) * rng.exponential(HICCUP, shape)
        return np.asarray(WORK_S * np.exp(logs.min(axis=1)))

    def _wander(self, steps: Array) -> Array:
        """Slow drifts, which the repeats of one check share: each check remembers the last one."""
        logs = self.scatter * steps
        for number in range(1, len(logs)):
            logs[number] *= np.sqrt(1 - MEMORY**2)
            logs[number] += MEMORY * logs[number - 1]
        return logs


@dataclass(frozen=True)
class Figures:
    """What one rule does in one setting."""

    rule: RuleName
    peers: int
    noise: NoiseKind
    scatter: float
    checks: int
    false_positives: float
    """Share of clean checks in which somebody is named."""
    unconfirmed: float
    """Share of clean checks that ask for a repetition."""
    found: Mapping[float, Mapping[int, float]]
    """Share of trials that name exactly the slow rank, by slow-down (0.1) and checks allowed."""
    innocent: float
    """Share of all trials with a straggler in which another rank is named."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        found = {
            f"+{100 * slowdown:.0f}%": {f"within_{checks}": share for checks, share in by.items()}
            for slowdown, by in self.found.items()
        }
        return {**vars(self), "found": found}


def measure(
    rule: RuleName,
    peers: int,
    noise: Noise,
    *,
    checks: int,
    trials: int,
    slowdowns: tuple[float, ...],
    seed: int = 0,
) -> Figures:
    """Count false positives over clean checks, and detections of one slow rank.

    Args:
        peers: size of the peer group, at least 3.
        checks: clean checks in a row, each judged.
        trials: per slow-down; a random rank is slow from one check on, after a clean history.
        slowdowns: fractions above 0; 0.1 makes the rank 10 % slower.

    Raises:
        ScoutError: fewer than 3 peers, no check or trial, or a slow-down that is not positive.
    """
    _refuse(peers, checks, trials, slowdowns)
    rng = np.random.default_rng(seed)
    judge = _judge(rule, StragglerRule())
    statuses = Counter(judge(times).status for times in noise.checks(checks, peers, rng))
    found, innocent = {}, 0
    for slowdown in slowdowns:
        latencies, wrong = _trials(rule, peers, noise, slowdown, trials, rng)
        found[slowdown] = {n: sum(l <= n for l in latencies) / trials for n in WITHIN}
        innocent += wrong
    return Figures(
        rule,
        peers,
        noise.kind,
        noise.scatter,
        checks,
        statuses[Status.ATTRIBUTED] / checks,
        statuses[Status.INCONCLUSIVE] / checks,
        found,
        innocent / (trials * max(1, len(slowdowns))),
    )


def _refuse(peers: int, checks: int, trials: int, slowdowns: tuple[float, ...]) -> None:
    if peers < 3 or checks < 1 or trials < 1 or not all(s > 0 for s in slowdowns):
        raise ScoutError(
            f"simulation with {peers} peers, {checks} checks, {trials} trials, slow-downs "
            f"{list(slowdowns)}: at least 3 peers, 1 check, 1 trial and positive slow-downs"
        )


def _trials(
    rule: RuleName,
    peers: int,
    noise: Noise,
    slowdown: float,
    trials: int,
    rng: np.random.Generator,
) -> tuple[list[int], int]:
    """Checks until exactly the slow rank is named (a large number if never), and wrong trials."""
    latencies, wrong = [], 0
    history: dict[str, Any] = {}
    for trial in range(trials):
        if rule == "scout" and trial % TRIALS_PER_HISTORY == 0:
            history = _clean_history(peers, noise, rng)
        judge = _judge(rule, StragglerRule.from_state(history) if history else StragglerRule())
        slow = int(rng.integers(peers))
        times = noise.checks(max(WITHIN), peers, rng)
        times[:, slow] *= 1 + slowdown
        named = [judge(check).outliers for check in times]
        hits = [number for number, those in enumerate(named, start=1) if those == {slow}]
        latencies.append(hits[0] if hits else max(WITHIN) + 1)
        wrong += any(those - {slow} for those in named)
    return latencies, wrong


def _clean_history(peers: int, noise: Noise, rng: np.random.Generator) -> dict[str, Any]:
    rule = StragglerRule()
    for times in noise.checks(HISTORY, peers, rng):
        rule.update("work", dict(enumerate(times.tolist())))
    return rule.state()


def _judge(name: RuleName, rule: StragglerRule) -> Callable[[Array], Verdict]:
    if name == "scout":
        return lambda times: rule.update("work", dict(enumerate(times.tolist())))
    if name == "paper":
        return lambda times: statistical(times.tolist())
    if name == "fixed":
        return _fixed
    raise ScoutError(f"rule {name!r} is unknown; use one of {', '.join(RULES)}")


def _fixed(times: Array) -> Verdict:
    slow = frozenset(int(i) for i in np.flatnonzero(times > FIXED * np.median(times)))
    if 2 * len(slow) >= len(times):
        return Verdict(Status.INCONCLUSIVE, reason="no strict majority")
    return Verdict(Status.ATTRIBUTED, slow) if slow else Verdict(Status.AGREE)
