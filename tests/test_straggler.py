"""The calibrated straggler rule."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.consensus import Status, Verdict
from scout_core.decision.noise import COLD_CHECKS, WINDOW
from scout_core.decision.straggler import StragglerRule, log_ratio_to_others
from scout_core.errors import ScoutError

seconds = st.floats(1e-3, 1e3)
groups = st.lists(seconds, min_size=3, max_size=9)
histories = st.integers(3, 8).flatmap(
    lambda size: st.lists(
        st.lists(seconds, min_size=size, max_size=size), min_size=WINDOW, max_size=6
    )
)
seeds = st.integers(0, 2**32 - 1)


def verdicts(checks: list[list[float]], rule: StragglerRule | None = None) -> list[Verdict]:
    rule = rule or StragglerRule()
    return [rule.update("layer", dict(enumerate(times))) for times in checks]


def settled(times: list[float]) -> Verdict:
    """The verdict on a group that shows the same durations again and again, from a cold start."""
    return verdicts([times] * WINDOW)[-1]


def healthy(rng: np.random.Generator, checks: int, size: int, sigma: float) -> list[list[float]]:
    return np.exp(rng.normal(0.0, sigma, (checks, size))).tolist()


@given(histories)
def test_the_blamed_are_always_a_strict_minority(checks: list[list[float]]) -> None:
    for times, verdict in zip(checks, verdicts(checks), strict=True):
        assert 2 * len(verdict.outliers) < len(times)


@given(histories, st.floats(1.0, 1e3))
def test_scaling_all_durations_changes_nothing(checks: list[list[float]], factor: float) -> None:
    rule, scaled = (StragglerRule(absolute_floor_s=0.0) for _ in range(2))
    for times in checks:
        plain = rule.update("layer", dict(enumerate(times)))
        assert scaled.update("layer", {r: t * factor for r, t in enumerate(times)}) == plain


@given(seeds)
def test_a_relabelled_rank_keeps_its_blame(seed: int) -> None:
    rng = np.random.default_rng(seed)
    checks = healthy(rng, 20, 5, 0.01)
    slow = int(rng.integers(5))
    for times in checks[-5:]:
        times[slow] *= 1.4
    names = rng.choice(1000, 5, replace=False).tolist()
    order = rng.permutation(5)
    rule, renamed = StragglerRule(), StragglerRule()
    for times in checks:
        plain = rule.update("layer", dict(enumerate(times)))
        other = renamed.update("layer", {names[i]: times[i] for i in order})
        assert other.outliers == {names[i] for i in plain.outliers}
    assert plain.outliers == {slow}


@given(groups, st.sampled_from([math.nan, math.inf, -math.inf, -1.0]), seeds)
def test_a_duration_that_is_not_finite_is_never_healthy(
    times: list[float], broken: float, seed: int
) -> None:
    place = seed % len(times)
    times[place] = broken
    verdict = verdicts([times])[0]
    assert verdict.status is Status.ATTRIBUTED
    assert verdict.outliers == {place}


@pytest.mark.parametrize("times", [[1.0, math.nan], [math.nan, 1, math.inf], [math.nan] * 3])
def test_broken_durations_without_a_strict_minority_are_inconclusive(times: list[float]) -> None:
    assert settled(times).status is Status.INCONCLUSIVE


@given(groups, st.integers(1, 60))
def test_a_restart_changes_nothing(times: list[float], split: int) -> None:
    checks = [*healthy(np.random.default_rng(split), 60, len(times), 0.02), times, times, times]
    rule, restarted = StragglerRule(), StragglerRule()
    for number, check in enumerate(checks):
        if number == split:
            restarted = StragglerRule.from_state(json.loads(json.dumps(restarted.state())))
        plain = rule.update("layer", dict(enumerate(check)))
        assert restarted.update("layer", dict(enumerate(check))) == plain


@pytest.mark.parametrize("times", [[10, 10, 1000], [10, 10, 100], [10, 10, 15]])
def test_a_slow_rank_is_named_from_a_cold_start_within_three_checks(times: list[float]) -> None:
    assert settled(times) == Verdict(Status.ATTRIBUTED, frozenset({len(times) - 1}))


def test_a_slightly_slow_rank_is_named_once_its_group_has_some_history() -> None:
    named = [v.outliers for v in verdicts([[1, 1, 1, 1.1]] * 12)]
    assert named[:COLD_CHECKS] == [frozenset()] * COLD_CHECKS
    assert named[-1] == {3}


def test_noise_of_a_busy_machine_accuses_nobody_at_a_cold_start() -> None:
    for seed in range(200):
        checks = healthy(np.random.default_rng(seed), COLD_CHECKS, 4, 0.08)
        assert not any(v.outliers for v in verdicts(checks))


def test_a_straggler_from_the_first_check_on_never_counts_as_noise() -> None:
    rule = StragglerRule()
    assert {v.outliers for v in verdicts([[10, 10, 100]] * 200, rule)[WINDOW:]} == {frozenset({2})}
    assert verdicts([[10, 10, 15]] * WINDOW, rule)[-1].outliers == {2}


def test_a_suspicion_is_inconclusive_until_it_is_confirmed() -> None:
    first, second, third = verdicts([[10, 10, 10, 30]] * WINDOW)
    assert first.status is second.status is Status.INCONCLUSIVE
    assert "rank 3 (3.00 times the others)" in first.reason
    assert third.outliers == {3}


@given(seeds, st.integers(3, 8), st.floats(1.5, 1e6))
def test_one_freak_timing_names_nobody(seed: int, size: int, factor: float) -> None:
    checks = healthy(np.random.default_rng(seed), 20, size, 0.01)
    checks[12][seed % size] *= factor
    assert not any(v.outliers for v in verdicts(checks))


def test_two_ranks_that_differ_are_inconclusive() -> None:
    assert settled([10, 1000]).status is Status.INCONCLUSIVE
    assert settled([10, 10.1]).status is Status.AGREE


@pytest.mark.parametrize(
    ("times", "slow"),
    [([1] * 4 + [2] * 2, {4, 5}), ([1] * 5 + [2] * 3, {5, 6, 7}), ([3, 1, 1, 1, 1.5], {0, 4})],
)
def test_several_stragglers_are_named_at_once(times: list[float], slow: set[int]) -> None:
    assert settled(times).outliers == slow


@pytest.mark.parametrize(
    "times", [[10, 10, 10, 1], [10, 10, 1], [1, 1, 2, 2], [1, 3, 3.1], [1, 2, 3, 1]]
)
def test_without_a_fast_strict_majority_nobody_is_named(times: list[float]) -> None:
    assert settled(times).status is Status.INCONCLUSIVE


def test_nearly_a_second_millisecond_on_a_two_millisecond_layer_is_seen() -> None:
    assert settled([2e-3, 2e-3, 2e-3, 3.9e-3]).outliers == {3}


@pytest.mark.parametrize("times", [[1, 1, 1, 1.04], [100e-6, 100e-6, 100e-6, 145e-6], [0.0] * 4])
def test_a_difference_below_the_floors_is_nobodys_fault(times: list[float]) -> None:
    assert {v.status for v in verdicts([times] * 100)} == {Status.AGREE}


@pytest.mark.parametrize("size", [3, 4, 8, 32])
def test_healthy_noise_names_nobody(size: int) -> None:
    rng = np.random.default_rng(size)
    assert not any(v.outliers for v in verdicts(healthy(rng, 1500, size, 0.03)))


@pytest.mark.parametrize("size", [3, 4, 8])
def test_ten_percent_is_named_within_three_checks_at_one_percent_noise(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(20):
        checks = healthy(rng, 35, size, 0.007)
        slow = int(rng.integers(size))
        for times in checks[-WINDOW:]:
            times[slow] *= 1.1
        assert verdicts(checks)[-1].outliers == {slow}


def test_ranks_that_become_noisy_together_accuse_hardly_anybody() -> None:
    accused = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        checks = healthy(rng, 40, 8, 0.01) + healthy(rng, 60, 8, 0.1)
        accused += any(v.outliers for v in verdicts(checks))
    assert accused <= 1


def test_recipes_do_not_share_history() -> None:
    rule = StragglerRule()
    for times in healthy(np.random.default_rng(0), 60, 4, 0.1):
        rule.update("noisy", dict(enumerate(times)))
    found = [rule.update("quiet", {0: 1, 1: 1, 2: 1, 3: 1.5}) for _ in range(WINDOW)]
    assert found[-1].outliers == {3}


def test_a_recovered_rank_is_no_longer_named() -> None:
    slow, fine = [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]
    assert verdicts([slow] * 5 + [fine])[-1].status is Status.AGREE


def test_a_second_slow_rank_is_named_beside_one_that_was_slow_from_the_start() -> None:
    rule = StragglerRule()
    named = [v.outliers for v in verdicts([[1, 1, 1, 1, 1.2, 2]] * 20, rule)]
    assert named[WINDOW] == {5}
    assert named[-1] == {4, 5}


def test_what_was_learned_can_be_kept_for_judging_the_same_checks_again() -> None:
    rule, checks = StragglerRule(), [[1, 1, 1, 1.1]] * 8
    verdicts(checks, rule)
    rule.forget_last_checks()
    assert [v.outliers for v in verdicts(checks, rule)] == [set()] * 2 + [{3}] * 6


def test_slowdowns_say_how_many_times_slower() -> None:
    rule = StragglerRule()
    verdicts([[2.0, 2.0, 2.0, 3.0]] * WINDOW, rule)
    assert rule.slowdowns("layer")[3] == pytest.approx(1.5, rel=1e-4)
    assert rule.slowdowns("never timed") == {}


def test_a_rank_that_joins_later_is_compared_without_history() -> None:
    rule = StragglerRule()
    verdicts(healthy(np.random.default_rng(1), 30, 4, 0.01), rule)
    found = [rule.update("layer", {0: 1, 1: 1, 2: 1, 9: 2}) for _ in range(WINDOW)]
    assert found[-1].outliers == {9}


def test_a_rank_that_is_not_timed_now_and_then_does_not_stop_the_others_from_being_judged() -> None:
    rule, rng = StragglerRule(), np.random.default_rng(4)
    for number, times in enumerate(healthy(rng, 43, 5, 0.01)):
        times[1] *= 1.3 if number >= 40 else 1.0
        group = {rank: t for rank, t in enumerate(times) if rank != 4 or number % 2}
        verdict = rule.update("layer", group)
    assert verdict.outliers == {1}


def test_suspects_are_the_slow_ranks_that_wait_for_confirmation() -> None:
    rule = StragglerRule()
    found = []
    for _ in range(WINDOW):
        rule.update("layer", {0: 1.0, 1: 1.0, 2: 1.0, 7: 3.0})
        found.append(rule.suspects("layer"))
    assert found == [{7}, {7}, set()]


@given(st.lists(seconds, min_size=2, max_size=9))
def test_the_ratio_is_to_the_median_of_the_others(times: list[float]) -> None:
    expected = [math.log(t / np.median(times[:i] + times[i + 1 :])) for i, t in enumerate(times)]
    assert log_ratio_to_others(np.array(times)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kappa", [0, -1, math.nan, math.inf])
def test_a_sensitivity_that_is_not_positive_is_refused(kappa: float) -> None:
    with pytest.raises(ScoutError, match=r"kappa=.* of StragglerRule must be .* > 0"):
        StragglerRule(kappa)


def test_a_job_of_many_groups_needs_more_to_accuse_somebody() -> None:
    checks = healthy(np.random.default_rng(2), 64, 8, 0.03)
    checks += [[1.0] * 5 + [1.12] + [1.0] * 2] * WINDOW
    assert verdicts(checks, StragglerRule())[-1].outliers == {5}
    assert verdicts(checks, StragglerRule(groups=4096))[-1].outliers == set()
    with pytest.raises(ScoutError, match="groups=0 of StragglerRule"):
        StragglerRule(groups=0)


def test_a_negative_floor_is_refused() -> None:
    with pytest.raises(ScoutError, match="relative_floor=-1"):
        StragglerRule(relative_floor=-1)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ScoutError, match="empty peer group"):
        StragglerRule().update("layer", {})


def test_a_group_of_one_is_inconclusive() -> None:
    assert StragglerRule().update("layer", {5: 1.0}).status is Status.INCONCLUSIVE


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"schema": "scout.straggler/1"},
        {"schema": "scout.straggler/1", "recipes": {"layer": {"window": [[[0], [1.0]]]}}},
        {
            "schema": "scout.straggler/1",
            "recipes": {"a": {"window": [[[0, 1], [math.nan, 0], True, []]], "history": []}},
        },
    ],
)
def test_a_foreign_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ScoutError, match=r"straggler state .*start without it"):
        StragglerRule.from_state(state)
