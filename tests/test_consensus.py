"""C3's two rules: who is blamed, who never is, and when nobody can be."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.consensus import Status, Verdict, exact, robust_scale, statistical
from scout_core.decision.evidence import Duration, Fingerprint, Missing, Progress, Signature
from scout_core.errors import ScoutError

values = st.lists(st.integers(0, 3), min_size=1, max_size=9)
with_gaps = st.lists(
    st.one_of(st.integers(0, 2), st.builds(Missing, st.text(max_size=3))), min_size=1, max_size=9
)
healthy = st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=9)
broken = st.sampled_from([math.nan, math.inf, -math.inf, -1.0])


def literal_exact(evidence: list[int]) -> tuple[Status, set[int]]:
    """Algorithm 1, lines 4-9, and that one peer compares with nothing."""
    winner, count = Counter(evidence).most_common(1)[0]
    if count <= len(evidence) / 2 or len(evidence) == 1:
        return Status.INCONCLUSIVE, set()
    bits = {i for i, value in enumerate(evidence) if value != winner}
    return (Status.ATTRIBUTED if bits else Status.AGREE), bits


@given(values)
def test_the_exact_rule_is_the_papers(evidence: list[int]) -> None:
    verdict = exact(evidence)
    assert (verdict.status, set(verdict.outliers)) == literal_exact(evidence)


@given(with_gaps)
def test_the_blamed_are_always_a_strict_minority_and_gave_evidence(evidence: list[Any]) -> None:
    verdict = exact(evidence)
    assert 2 * len(verdict.outliers) < len(evidence)
    assert not any(isinstance(evidence[i], Missing) for i in verdict.outliers)


@given(with_gaps, st.randoms())
def test_relabelled_peers_keep_their_blame(evidence: list[Any], random: Any) -> None:
    order = list(range(len(evidence)))
    random.shuffle(order)
    before, after = exact(evidence), exact([evidence[i] for i in order])
    assert after.status is before.status
    assert {order[i] for i in after.outliers} == before.outliers


@given(values)
def test_which_values_are_equal_matters_not_what_they_are(evidence: list[int]) -> None:
    renamed = [f"value {3 - value}" for value in evidence]
    assert exact(renamed) == exact(evidence)


@given(with_gaps)
def test_agreement_needs_evidence_of_everyone(evidence: list[Any]) -> None:
    if exact(evidence).status is Status.AGREE:
        assert len(set(evidence)) == 1
        assert not isinstance(evidence[0], Missing)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_a_missing_peer_never_turns_silence_into_blame(evidence: list[Any], data: Any) -> None:
    position = data.draw(st.integers(0, len(evidence) - 1))
    gone = [*evidence[:position], Missing("out of memory"), *evidence[position + 1 :]]
    assert exact(gone).outliers <= exact(evidence).outliers


def test_two_that_differ_are_detected_and_nobody_is_blamed() -> None:
    verdict = exact([1, 2])
    assert verdict == Verdict(
        Status.INCONCLUSIVE, reason="no strict majority: 1 of 2 agree at most"
    )


@pytest.mark.parametrize("evidence", [[1, 1, 2, 2], [1, 2, 3], [0, 1, 1, 2]])
def test_a_tie_is_never_resolved(evidence: list[int]) -> None:
    assert exact(evidence).status is Status.INCONCLUSIVE


def test_two_faulty_of_five_are_both_named_though_their_values_differ() -> None:
    assert exact([7, 8, 7, 9, 7]).outliers == {1, 3}


def test_one_peer_has_nothing_to_compare_with() -> None:
    assert exact([1]).status is Status.INCONCLUSIVE
    assert statistical([1.0]).status is Status.INCONCLUSIVE


@pytest.mark.parametrize("rule", [exact, statistical])
def test_an_empty_group_is_an_error(rule: Any) -> None:
    with pytest.raises(ScoutError, match="empty peer group"):
        rule([])


KINDS: list[Any] = [
    Signature(1, "xxh3"),
    Signature(1, "scout64"),
    Progress(1, 1),
    Duration(1.0),
    Fingerprint("dp", 1, "all_reduce", "float32[4]"),
    *(1, 1.0, True, "1", 1 << 63),
]


@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6), st.randoms())
def test_mixed_kinds_are_not_comparable_for_every_rank_alike(
    evidence: list[Any], random: Any
) -> None:
    kinds = {(type(value), getattr(value, "algorithm", "")) for value in evidence}
    verdict = exact(evidence)
    assert verdict.comparable == (len(kinds) == 1)
    if len(kinds) > 1:
        assert verdict.status is Status.INCONCLUSIVE
        shuffled = random.sample(evidence, len(evidence))
        assert exact(shuffled) == verdict


def test_signatures_of_different_algorithms_are_not_comparable() -> None:
    verdict = exact([Signature(1, "xxh3"), Signature(1, "xxh3"), Signature(1, "scout64")])
    assert (verdict.status, verdict.comparable) == (Status.INCONCLUSIVE, False)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=3, max_size=3, unique=True))
def test_all_64_bits_of_a_signature_count(bits: list[int]) -> None:
    good, bad, _ = (Signature(value, "xxh3") for value in bits)
    assert exact([good, good, bad]).outliers == {2}


@given(healthy, st.integers(-20, 20))
def test_scaling_all_durations_changes_nothing(times: list[float], power: int) -> None:
    assert statistical([t * 2.0**power for t in times]) == statistical(times)


@given(healthy, st.randoms())
def test_relabelled_durations_keep_their_blame(times: list[float], random: Any) -> None:
    order = list(range(len(times)))
    random.shuffle(order)
    before, after = statistical(times), statistical([times[i] for i in order])
    assert after.status is before.status
    assert {order[i] for i in after.outliers} == before.outliers


@given(st.lists(st.one_of(st.floats(1e-6, 1e3), broken), min_size=1, max_size=9))
def test_a_minority_at_most_is_blamed_for_time(times: list[float]) -> None:
    verdict = statistical(times)
    assert 2 * len(verdict.outliers) < len(times)
    unhealthy = {i for i, t in enumerate(times) if not (math.isfinite(t) and t >= 0)}
    if unhealthy:
        assert verdict.status is not Status.AGREE
    if verdict.status is Status.ATTRIBUTED:
        assert unhealthy <= verdict.outliers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_three_failing_of_four_never_attributes_the_three(bad: float) -> None:
    assert statistical([1.0, bad, bad, bad]).status is Status.INCONCLUSIVE
    assert exact([1, 2, 2, 2]).outliers == {0}
    assert exact([1, *[Missing("raised")] * 3]).status is Status.INCONCLUSIVE


@given(st.integers(3, 64), st.data())
def test_one_rank_far_from_equal_others_is_flagged_in_any_group(size: int, data: Any) -> None:
    slow = data.draw(st.integers(0, size - 1))
    times = [10.0] * size
    times[slow] = 1000.0
    assert statistical(times).outliers == {slow}


def test_median_and_mad_flag_what_the_paper_shows() -> None:
    times = [10.0, 10.1, 9.9, 10.05, 9.95, 10.02, 9.98, 14.5]
    assert statistical(times, kappa=3.5).outliers == {7}


@given(healthy, st.floats(0.1, 10))
def test_the_statistical_rule_is_deviation_over_kappa_scales(
    times: list[float], kappa: float
) -> None:
    deviation = np.abs(np.array(times) - np.median(times))
    flagged = set(np.flatnonzero(deviation > kappa * robust_scale(np.array(times))))
    verdict = statistical(times, kappa)
    if 2 * len(flagged) < len(times) and len(times) > 2:
        assert set(verdict.outliers) == flagged


def test_equal_durations_agree_also_in_a_group_of_two() -> None:
    assert statistical([2.0, 2.0]).status is Status.AGREE
    assert statistical([10.0, 1000.0]).status is Status.INCONCLUSIVE


def test_the_scale_falls_back_from_mad_to_quartiles_to_range() -> None:
    assert robust_scale(np.array([1.0, 2.0, 4.0])) == 1.0
    assert robust_scale(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 9.0])) == 2.0
    assert robust_scale(np.array([1.0, 1.0, 1.0, 1.0, 9.0])) == 2.0
    assert robust_scale(np.array([1.0, 1.0])) == 0.0


@pytest.mark.parametrize("kappa", [0.0, -1.0, math.nan])
def test_kappa_must_be_positive(kappa: float) -> None:
    with pytest.raises(ScoutError, match=r"kappa=.* must be > 0"):
        statistical([1.0, 2.0, 3.0], kappa)


def test_a_verdict_with_outliers_is_attributed_and_only_then() -> None:
    with pytest.raises(AssertionError):
        Verdict(Status.AGREE, frozenset({1}))
    with pytest.raises(AssertionError):
        Verdict(Status.ATTRIBUTED)
