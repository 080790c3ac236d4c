"""The calibrated straggler rule: what names a slow rank.

The paper's statistical rule takes its scale from the one check it judges, and with 3 to 8 peers
such a scale is often tiny by chance: it flags healthy groups in about half of all checks. This rule
departs from it in five places: the scale is pooled over the clean checks of the same recipe, a rank
is compared with the median of the OTHERS, only slow ranks count, the last three checks must agree,
and differences below a relative and an absolute floor are nobody's fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scout_core.decision.consensus import Status, Verdict
from scout_core.decision.evidence import is_healthy_duration
from scout_core.decision.noise import (
    HISTORY,
    WINDOW,
    Array,
    Check,
    Noise,
    matrix_of,
    medians_of,
    noise_of,
    window_scale,
)
from scout_core.errors import ScoutError

SMALL, LARGE = 3, 64  # peers up to and from which the threshold is raised
FAST = 1.25  # a minority that is this much faster than the median did other work
SHORTEST_S = 1e-9  # a duration of 0 counts as one nanosecond
STATE_SCHEMA = "scout.straggler/1"


@dataclass
class _Recipe:
    """What the rule remembers of one recipe, oldest first."""

    window: list[Check] = field(default_factory=list)
    history: list[Check] = field(default_factory=list)
    suspects: frozenset[int] = frozenset()
    """Slow in the last check, not yet confirmed."""


class StragglerRule:
    """Name the ranks that are persistently slower than their peers.

    One instance serves one peer group; each kind of timed work is a recipe with its own history.
    Feed every check, clean or not. All members of a group that feed the same durations hold the
    same state, so each decides alike without a coordinator.
    """

    def __init__(
        self,
        kappa: float = 5.0,
        *,
        relative_floor: float = 0.05,
        absolute_floor_s: float = 50e-6,
        groups: int = 1,
    ) -> None:
        """Set the sensitivity.

        Args:
            kappa: > 0, threshold in scales; one more is used in a group of 3, where the median
                of the others is the mean of two, and half a one more per doubling beyond 64
                peers, where a rare freak is no longer rare.
            relative_floor: a rank less than this fraction slower than the others is not slow.
            absolute_floor_s: nor is one that loses less than this many seconds.
            groups: peer groups of the job that are judged at the same time. The threshold grows
                with them, so that a large job does not accuse somebody more often than a small one.

        Raises:
            ScoutError: kappa is not positive, a floor is negative or not finite, or groups < 1.
        """
        if not (kappa > 0 and math.isfinite(kappa)):
            raise ScoutError(
                f"kappa={kappa} of StragglerRule must be a finite number > 0; "
                "5 is the calibrated choice, larger is less sensitive"
            )
        for name, value in (
            ("relative_floor", relative_floor),
            ("absolute_floor_s", absolute_floor_s),
        ):
            if not is_healthy_duration(value):
                raise ScoutError(f"{name}={value} of StragglerRule must be a finite number >= 0")
        if groups < 1:
            raise ScoutError(f"groups={groups} of StragglerRule must be at least 1")
        self.kappa = kappa
        self.groups = groups
        self.relative_floor = relative_floor
        self.absolute_floor_s = absolute_floor_s
        self._recipes: dict[str, _Recipe] = {}

    def update(self, recipe: str, durations_s: Mapping[int, float]) -> Verdict:
        """Judge one more check.

        Args:
            recipe: name of the timed work; only checks of the same recipe are compared.
            durations_s: seconds by GLOBAL RANK, one per member of the peer group, each the
                fastest of several repeats. A duration that is not finite or is negative is
                never healthy.

        Returns:
            A verdict whose `outliers` are GLOBAL RANKS, not positions. ATTRIBUTED when the last
            three checks agree, also from a cold start, and at once for a duration that is not
            finite. INCONCLUSIVE when this check is suspicious and not yet confirmed (repeat it),
            when no strict majority is faster than the slow ranks, when a minority is much faster
            than the rest, or when the group is smaller than 3 and differs.

        Raises:
            ScoutError: no duration was given.
        """
        if not durations_s:
            raise ScoutError("an empty peer group cannot be compared; pass one duration per rank")
        memory = self._recipes.setdefault(recipe, _Recipe())
        memory.suspects = frozenset()
        size = len(durations_s)
        if size == 1:
            return _inconclusive("a group of 1 has nothing to compare with")
        broken = {r for r, t in durations_s.items() if not is_healthy_duration(t)}
        ranks = tuple(sorted(durations_s.keys() - broken))
        if 2 * len(broken) >= size:
            return _inconclusive(f"{len(broken)} of {size} durations are not finite times")
        if len(ranks) < 2:
            return Verdict(Status.ATTRIBUTED, frozenset(broken))
        times = np.array([max(durations_s[r], SHORTEST_S) for r in ranks])
        verdict = self._judge(memory, ranks, times)
        if broken and verdict.status is not Status.ATTRIBUTED:
            return Verdict(Status.ATTRIBUTED, frozenset(broken))
        return _strict_minority(verdict.outliers | broken, size) if broken else verdict

    def slowdowns(self, recipe: str) -> dict[int, float]:
        """Return by global rank how many times the others' duration its last checks took."""
        window = self._recipes.get(recipe, _Recipe()).window
        if not window:
            return {}
        ranks = window[-1].ranks
        recent = medians_of(matrix_of(window, ranks))
        return {rank: float(np.exp(z)) for rank, z in zip(ranks, recent, strict=True)}

    def suspects(self, recipe: str) -> frozenset[int]:
        """Return the global ranks that were slow in the last check and are not confirmed yet."""
        return self._recipes.get(recipe, _Recipe()).suspects

    def forget_last_checks(self) -> None:
        """Judge anew, with the noise that was learned: needs three checks to name anybody."""
        for memory in self._recipes.values():
            for check in memory.window:
                _admit(memory, check)
            memory.window.clear()

    def state(self) -> dict[str, Any]:
        """Return everything the rule remembers, as JSON values."""
        recipes = {
            name: {"window": _plain(memory.window), "history": _plain(memory.history)}
            for name, memory in self._recipes.items()
        }
        return {"schema": STATE_SCHEMA, "recipes": recipes}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], kappa: float = 5.0, **settings: Any
    ) -> StragglerRule:
        """Continue from what `state` returned; sensitivity is given anew, as to the constructor.

        Raises:
            ScoutError: not such a state.
        """
        rule = cls(kappa, **settings)
        if state.get("schema") != STATE_SCHEMA:
            raise ScoutError(
                f"straggler state has schema {state.get('schema')!r}, not {STATE_SCHEMA!r}; "
                "start without it"
            )
        try:
            for name, memory in state["recipes"].items():
                parts = (_checks(memory["window"]), _checks(memory["history"]))
                rule._recipes[name] = _Recipe(*parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScoutError(
                f"straggler state cannot be read ({error!r}); start without it"
            ) from error
        return rule

    def _judge(self, memory: _Recipe, ranks: tuple[int, ...], times: Array) -> Verdict:
        check = Check(ranks, np.round(log_ratio_to_others(times), 6))
        _advance(memory, check)
        noise = noise_of(memory.history, ranks)
        window = matrix_of(memory.window, ranks)
        losing = times - np.exp(np.log(times) - check.z) > self.absolute_floor_s
        kappa = self._threshold(len(ranks))
        slow = self._persistent(window, noise, kappa) & losing
        single = max(kappa * noise.scale, math.log1p(self.relative_floor))
        suspects = (check.z > single) & losing & ~slow
        memory.suspects = _ranks(check, suspects)
        if slow.any():
            verdict = _separated(check, times, slow, math.log1p(self.relative_floor) / 2)
            for seen in memory.window:
                seen.blamed |= verdict.outliers
            return verdict
        if suspects.any():
            return _inconclusive(_unconfirmed(check, suspects))
        _admit(memory, check)
        fast = np.log(times / np.median(times)) < -max(kappa * noise.scale, math.log(FAST))
        if (fast & (np.median(times) - times > self.absolute_floor_s)).any():
            return _inconclusive(_too_fast(check, fast))
        return Verdict(Status.AGREE)

    def _threshold(self, peers: int) -> float:
        """Scales above which a rank is slow, by how many ranks are judged at once."""
        kappa = self.kappa + (1.0 if peers <= SMALL else 0.0)
        if peers > LARGE:
            kappa += 0.5 * math.log2(peers / LARGE)
        # The largest of n normal values grows like this; it keeps the job's false alarms at those
        # of one group.
        return math.sqrt(kappa**2 + 2 * math.log(self.groups))

    def _persistent(self, window: Array, noise: Noise, kappa: float) -> Array:
        """(N,) True where the winsorised mean of the (checks, N) window is above the threshold."""
        threshold = max(kappa * noise.of_mean, math.log1p(self.relative_floor))
        slow = _above(window, threshold)
        if slow.any():
            scatter = window_scale((window - noise.offsets)[:, ~slow], noise.scale)
            slow = _above(window, max(kappa * scatter / math.sqrt(WINDOW), threshold))
        return slow


def log_ratio_to_others(times: Array) -> Array:
    """Return log(t / median of the other values) for each of (N,) positive values, N >= 2."""
    size = len(times)
    order = np.argsort(times, kind="stable")
    ascending = times[order]
    position = np.empty(size, dtype=np.intp)
    position[order] = np.arange(size)
    low, high = (size - 2) // 2, (size - 1) // 2
    middle = ascending[low + (low >= position)] + ascending[high + (high >= position)]
    ratio: Array = np.log(2 * times / middle)
    return ratio


def _above(window: Array, threshold: float) -> Array:
    """(N,) for a (checks, N) window. One freak timing cannot carry the mean alone."""
    if len(window) < WINDOW:
        return np.zeros(window.shape[1], dtype=bool)
    mean: Array = np.minimum(window, 2 * threshold).mean(axis=0)
    return (mean > threshold) & (window > threshold / 2).all(axis=0)


def _advance(memory: _Recipe, check: Check) -> None:
    memory.window.append(check)
    for leaving in memory.window[:-WINDOW]:
        _admit(memory, leaving)
    del memory.window[:-WINDOW]


def _admit(memory: _Recipe, check: Check) -> None:
    if check.pooled:
        return
    check.pooled = True
    healthy = [i for i, rank in enumerate(check.ranks) if rank not in check.blamed]
    ranks = tuple(check.ranks[i] for i in healthy)
    memory.history.append(Check(ranks, check.z[healthy], pooled=True))
    del memory.history[:-HISTORY]


def _separated(check: Check, times: Array, slow: Array, margin: float) -> Verdict:
    """Blame the slow ranks when a strict majority of the group is clearly faster than them."""
    size = len(times)
    majority = float(np.sort(times)[size // 2])
    if size == 2 or (np.log(times[slow] / majority) < margin).any():
        return _inconclusive(f"no strict majority of {size} ranks is faster than the slow ones")
    return _strict_minority(_ranks(check, slow), size)


def _strict_minority(outliers: frozenset[int], size: int) -> Verdict:
    if 2 * len(outliers) >= size:
        return _inconclusive(f"{len(outliers)} of {size} ranks are slow: no strict majority")
    return Verdict(Status.ATTRIBUTED, outliers)


def _ranks(check: Check, chosen: Array) -> frozenset[int]:
    return frozenset(check.ranks[i] for i in np.flatnonzero(chosen))


def _unconfirmed(check: Check, suspects: Array) -> str:
    names = ", ".join(
        f"rank {check.ranks[i]} ({np.exp(check.z[i]):.2f} times the others)"
        for i in np.flatnonzero(suspects)
    )
    return f"slow in this check, not yet confirmed by three in a row: {names}"


def _too_fast(check: Check, fast: Array) -> str:
    names = ", ".join(str(check.ranks[i]) for i in np.flatnonzero(fast))
    return f"ranks {names} are much faster: they did other work, or the majority is slow"


def _inconclusive(reason: str) -> Verdict:
    return Verdict(Status.INCONCLUSIVE, reason=reason)


def _plain(checks: Sequence[Check]) -> list[list[Any]]:
    return [[list(c.ranks), c.z.tolist(), c.pooled, sorted(c.blamed)] for c in checks]


def _checks(plain: Sequence[Sequence[Any]]) -> list[Check]:
    checks = []
    for ranks, z, pooled, blamed in plain:
        values = np.array(z, dtype=np.float64)
        if values.shape != (len(ranks),) or not np.isfinite(values).all():
            raise ValueError(f"{len(ranks)} ranks with {values.size} values")
        members, names = (tuple(int(rank) for rank in those) for those in (ranks, blamed))
        checks.append(Check(members, values, bool(pooled), frozenset(names)))
    return checks
