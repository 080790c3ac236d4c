"""The temporal baseline."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.baseline import LEARNING, Slowdown, SlowdownRule
from scout_core.errors import ScoutError

seeds = st.integers(0, 2**32 - 1)


def fed(values: list[float], rule: SlowdownRule | None = None) -> list[Slowdown]:
    rule = rule or SlowdownRule()
    return [rule.update("job", value) for value in values]


def steps(seed: int, count: int, sigma: float = 0.01) -> list[float]:
    return np.exp(np.random.default_rng(seed).normal(0.0, sigma, count)).tolist()


@given(seeds, st.floats(1e-3, 1e3))
def test_scaling_all_durations_changes_nothing(seed: int, factor: float) -> None:
    plain = fed([*steps(seed, 40), *np.multiply(steps(seed, 10), 1.1)])
    scaled = fed(np.multiply([*steps(seed, 40), *np.multiply(steps(seed, 10), 1.1)], factor))
    assert [s.slow for s in scaled] == [s.slow for s in plain]


@given(seeds)
def test_a_whole_group_that_becomes_a_tenth_slower_is_seen(seed: int) -> None:
    found = fed([*steps(seed, 64), *np.multiply(steps(seed + 1, 6), 1.1)])
    assert not any(s.slow for s in found[:64])
    assert found[-1].slow
    assert found[-1].factor == pytest.approx(1.1, abs=0.03)
    assert 3 <= found[-1].checks <= 10


def test_a_gradual_slowdown_is_seen() -> None:
    creep = [t * 1.002**i for i, t in enumerate(steps(3, 200, 0.005))]
    assert fed(creep)[-1].slow


@pytest.mark.parametrize("seed", range(10))
def test_steady_noise_is_no_slowdown(seed: int) -> None:
    assert not any(s.slow for s in fed(steps(seed, 300, 0.02)))


@given(seeds, st.floats(1.2, 1e6))
def test_one_freak_check_is_no_slowdown(seed: int, factor: float) -> None:
    values = steps(seed, 60)
    values[50] *= factor
    assert not any(s.slow for s in fed(values))


def test_a_baseline_that_wanders_is_no_slowdown() -> None:
    alarms = 0
    for seed in range(10):
        noise, value, values = np.random.default_rng(seed), 0.0, []
        for _ in range(300):
            value = 0.5 * value + noise.normal(0, 0.01)
            values.append(math.exp(value))
        alarms += any(s.slow for s in fed(values))
    assert alarms == 0


def test_a_rise_inside_the_dead_zone_is_forgiven() -> None:
    assert not any(s.slow for s in fed([1.0] * 64 + [1.019] * 500))


def test_nothing_is_judged_while_the_reference_is_short() -> None:
    assert not any(s.slow for s in fed([1.0] * (LEARNING - 1) + [5.0]))


def test_a_recovery_is_seen() -> None:
    found = fed([1.0] * 64 + [1.2] * 20 + [1.0] * 20)
    assert found[83].slow
    assert not found[-1].slow
    assert found[-1].checks == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_a_duration_that_is_not_finite_changes_nothing(broken: float) -> None:
    rule, plain = SlowdownRule(), SlowdownRule()
    fed([1.0] * 70, plain)
    fed([1.0] * 70, rule)
    assert rule.update("job", broken) == plain.update("job", 1.0)
    assert rule.state() == plain.state()


@given(seeds, st.integers(0, 80))
def test_a_restart_changes_nothing(seed: int, split: int) -> None:
    values = [*steps(seed, 60), *np.multiply(steps(seed, 20), 1.05)]
    rule = SlowdownRule()
    before = fed(values[:split], rule)
    after = fed(values[split:], SlowdownRule.from_state(json.loads(json.dumps(rule.state()))))
    assert before + after == fed(values)


def test_keys_do_not_share_a_reference() -> None:
    rule = SlowdownRule()
    for value in steps(0, 64):
        rule.update("a", value)
        rule.update("b", 3 * value)
    assert not rule.update("b", 3.0).slow
    assert rule.update("a", 3.0).factor > 1.3


def test_a_wanted_change_is_learned_anew() -> None:
    rule = SlowdownRule()
    fed([1.0] * 64 + [2.0] * 9, rule)
    rule.forget("job")
    assert not any(s.slow for s in fed([2.0] * 50, rule))


def test_a_negative_dead_zone_is_refused() -> None:
    with pytest.raises(ScoutError, match=r"dead_zone=-0.1 of SlowdownRule"):
        SlowdownRule(dead_zone=-0.1)


@pytest.mark.parametrize("state", [{}, {"schema": "scout.slowdown/1", "keys": {"job": 3}}])
def test_a_foreign_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ScoutError, match=r"slowdown state .*start without it"):
        SlowdownRule.from_state(state)
