"""Executed work is covered by the catalogue, by an exact replay afterwards, or not yet."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.catalog import (
    Observation,
    Shape,
    build_catalog,
    exact_observation,
)
from scout_core.decision.path_coverage import PathCoverage, Shares, agree_queue
from scout_core.decision.schedule import GroupedGemm, uniform
from scout_core.errors import ScoutError

GEMM = GroupedGemm(64, 64, experts=3, num_sms=8)
CATALOG = build_catalog(GEMM.observation(uniform(3, n)) for n in range(1, 65))

vectors = st.tuples(*[st.integers(0, 90)] * 3)
runs = st.lists(st.lists(vectors, max_size=4), min_size=1, max_size=6)


def by_pair(shape: Shape) -> Observation:
    """Execution of a two-expert shape: its two row counts are its two paths."""
    assert isinstance(shape, tuple)
    return Observation(shape, "F", {"a": shape[0], "b": shape[1]})


def rows_of(run: list[list[tuple[int, ...]]]) -> int:
    return sum(sum(vector) for step in run for vector in step)


@given(runs)
def test_every_executed_row_is_in_exactly_one_share(run: list[list[tuple[int, ...]]]) -> None:
    coverage = PathCoverage(CATALOG, GEMM.observation)
    for step, executed in enumerate(run):
        coverage.on_step(step, executed)
        for shape in coverage.plan(1):
            coverage.on_clean_replay(shape, step)
    assert coverage.shares.executed == rows_of(run)
    assert min(coverage.shares) >= 0


@given(runs)
def test_replaying_the_queue_covers_everything(run: list[list[tuple[int, ...]]]) -> None:
    coverage = PathCoverage(CATALOG, GEMM.observation)
    for step, executed in enumerate(run):
        coverage.on_step(step, executed)
    for shape in coverage.queue:
        coverage.on_clean_replay(shape, len(run))
    assert coverage.queue == ()
    assert coverage.shares.not_yet == 0


@given(st.lists(vectors, min_size=1, max_size=8))
def test_a_vector_is_covered_exactly_when_a_representative_dominates_it(
    executed: list[tuple[int, ...]],
) -> None:
    coverage = PathCoverage(CATALOG, GEMM.observation)
    coverage.on_step(0, executed)
    expected = 0
    for vector in executed:
        wanted = GEMM.observation(vector)
        for representative in CATALOG.representatives:
            given_ = GEMM.observation(representative)
            assert isinstance(given_.path_counts, dict)
            assert isinstance(wanted.path_counts, dict)
            if given_.fingerprint == wanted.fingerprint and all(
                given_.path_counts[path] >= n for path, n in wanted.path_counts.items()
            ):
                expected += sum(vector)
                break
    assert coverage.shares.catalogue == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_the_queue_is_the_smallest_that_covers_what_waits(executed: list[Shape]) -> None:
    coverage = PathCoverage(None, by_pair)
    coverage.on_step(0, executed)
    assert set(coverage.queue) == set(build_catalog(map(by_pair, executed)).representatives)


def test_work_executed_after_a_replay_waits_again() -> None:
    coverage = PathCoverage(None, exact_observation)
    coverage.on_step(0, [(3, 4)])
    coverage.on_clean_replay((3, 4), step=0)
    assert coverage.shares == Shares(0, 7, 0, 0)
    coverage.on_step(1, [(3, 4), (3, 4)])
    assert coverage.shares == Shares(0, 7, 14, 0)


def test_a_replay_agreed_on_before_a_step_says_nothing_about_that_step() -> None:
    coverage = PathCoverage(None, exact_observation)
    coverage.on_step(0, [5])
    coverage.on_step(1, [5])
    coverage.on_clean_replay(5, step=0)
    assert coverage.shares.queued == 10


def test_without_a_catalogue_everything_waits_for_its_own_replay() -> None:
    coverage = PathCoverage(None, exact_observation)
    coverage.on_step(0, [(1, 2), (9, 9)])
    assert set(coverage.queue) == {(1, 2), (9, 9)}
    coverage.on_clean_replay((9, 9), step=0)
    assert coverage.queue == ((1, 2),)


def test_without_a_model_only_admissible_shapes_are_covered() -> None:
    catalog = build_catalog([Observation(n, "F", (n,)) for n in (1, 2, 3)])
    coverage = PathCoverage(catalog, exact_observation)
    coverage.on_step(0, [2, 4])
    assert coverage.shares == Shares(catalogue=2, exact=0, queued=4, skipped=0)


def test_the_oldest_work_is_replayed_first() -> None:
    coverage = PathCoverage(None, exact_observation)
    for step, shape in enumerate([9, 2, 5]):
        coverage.on_step(step, [shape])
    assert coverage.queue == (9, 2, 5)


def test_queue_and_representatives_take_turns() -> None:
    catalog = build_catalog([Observation(n, str(n), (1,)) for n in (1, 2, 3)])
    coverage = PathCoverage(catalog, exact_observation)
    coverage.on_step(0, [70, 80])
    planned = coverage.plan(1) + coverage.plan(1)
    assert planned == (70, 1)
    assert set(coverage.plan(9)) == {70, 80, 1, 2, 3}


def test_a_full_cycle_includes_the_queue_of_its_start() -> None:
    catalog = build_catalog([Observation(1, "F", (1,)), Observation(2, "G", (1,))])
    coverage = PathCoverage(catalog, exact_observation)
    coverage.on_step(0, [50])
    coverage.start_cycle()
    for representative in (1, 2):
        assert not coverage.cycle_done
        coverage.on_clean_replay(representative, step=0)
    assert not coverage.cycle_done
    coverage.on_step(1, [60])  # executed in the cycle: the next cycle owes it
    coverage.on_clean_replay(50, step=1)
    assert coverage.cycle_done
    coverage.start_cycle()
    for representative in (1, 2):
        coverage.on_clean_replay(representative, step=1)
    assert not coverage.cycle_done


def test_what_is_not_looked_up_is_not_covered() -> None:
    catalog = build_catalog([Observation(n, "F", (1,)) for n in range(1, 5)])
    coverage = PathCoverage(catalog, exact_observation, lookups_per_step=1)
    for step in range(4):
        coverage.on_step(step, [1, 2, 3, 4])
    assert coverage.shares == Shares(catalogue=10, exact=0, queued=0, skipped=30)
    assert coverage.shares.not_yet == 30


def test_a_full_queue_skips_and_says_so() -> None:
    coverage = PathCoverage(None, exact_observation, max_waiting=2)
    coverage.on_step(0, [10, 20, 30])
    assert coverage.shares == Shares(catalogue=0, exact=0, queued=30, skipped=30)


def test_shares_print_as_percentages_of_executed_work() -> None:
    said = str(Shares(catalogue=50, exact=25, queued=20, skipped=5))
    assert said == ("expert work: 50.00 % by catalogue, 25.00 % by exact replay, 25.00 % not yet")
    assert "0.00 % by catalogue" in str(Shares(0, 0, 0, 0))


@given(st.permutations(range(3)), st.lists(runs, min_size=3, max_size=3))
@settings(max_examples=25)
def test_peers_agree_on_one_queue_that_covers_the_work_of_each(
    order: list[int], drawn: list[list[list[tuple[int, ...]]]]
) -> None:
    peers = [PathCoverage(CATALOG, GEMM.observation) for _ in range(3)]
    for peer, run in zip(peers, drawn, strict=True):
        for step, executed in enumerate(run):
            peer.on_step(step, executed)
    queues = [peer.queue for peer in peers]
    agreed = agree_queue(queues, GEMM.observation)
    assert agreed == agree_queue([queues[i] for i in order], GEMM.observation)
    for peer in peers:
        for shape in agreed:
            peer.on_clean_replay(shape, step=99)
        assert peer.shares.not_yet == 0


@pytest.mark.parametrize("limit", ["lookups_per_step", "max_waiting"])
def test_a_limit_below_one_is_refused(limit: str) -> None:
    with pytest.raises(ScoutError, match=f"{limit}=0"):
        PathCoverage(None, exact_observation, **{limit: 0})


@pytest.mark.parametrize("experts", [2, 16])
def test_random_routing_is_covered_in_full_once_its_queue_is_replayed(experts: int) -> None:
    gemm = GroupedGemm(128, 128, experts)
    catalog = build_catalog(gemm.observation(uniform(experts, n)) for n in range(1, 200))
    coverage = PathCoverage(catalog, gemm.observation)
    generator = np.random.default_rng(experts)
    for step in range(40):
        share = generator.dirichlet(np.full(experts, 0.5))
        coverage.on_step(step, [tuple(generator.multinomial(100 * experts, share).tolist())])
    assert 0 < coverage.shares.queued <= coverage.shares.executed
    for shape in coverage.queue:
        coverage.on_clean_replay(shape, step=39)
    assert coverage.shares.not_yet == 0
    assert coverage.shares.executed == 40 * 100 * experts


def test_a_retired_representative_covers_nothing_any_more() -> None:
    catalog = build_catalog(by_pair(shape) for shape in [(4, 4), (9, 2)])
    coverage = PathCoverage(catalog, by_pair)
    coverage.on_step(0, [(3, 3)])
    coverage.retire((4, 4))
    coverage.on_step(1, [(3, 3), (4, 4), (8, 2)])
    assert coverage.shares == Shares(catalogue=6 + 10, exact=0, queued=6, skipped=8)
    assert (4, 4) not in {shape for _ in range(3) for shape in coverage.plan(2)}


def test_a_queued_vector_that_is_retired_is_skipped() -> None:
    coverage = PathCoverage(None, exact_observation)
    coverage.on_step(0, [(3,), (5,)])
    coverage.start_cycle()
    coverage.retire((3,))
    coverage.on_clean_replay((5,), 1)
    assert coverage.shares == Shares(0, 5, 0, 3)
    assert coverage.cycle_done


def test_a_representative_that_is_passed_over_has_had_its_turn() -> None:
    coverage = PathCoverage(build_catalog(map(exact_observation, [1, 2, 3])), exact_observation)
    coverage.pass_over(1)
    coverage.pass_over(7)  # not one of them
    assert coverage.plan(3) == (2, 3)
    coverage.refill()
    assert coverage.plan(3) == (2, 3)  # these have not had theirs


def test_rows_that_nobody_knows_are_skipped() -> None:
    coverage = PathCoverage(None, exact_observation)
    coverage.skip(12)
    assert coverage.shares.not_yet == 12
