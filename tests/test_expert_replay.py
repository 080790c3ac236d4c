"""What expert turns replay: representatives in rotation and executed rows, alike on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.catalog import Catalog, build_catalog, exact_observation
from scout_core.decision.expert_replay import ExpertReplays, Launches, Planned, Rows
from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Label

ALONE = Launches(num_experts=2, grouped=False)
EXACT = build_catalog(exact_observation((n,)) for n in (8, 16, 24))
rows = st.tuples(st.integers(0, 60), st.integers(0, 60))
steps = st.lists(st.lists(rows, max_size=3), min_size=1, max_size=8)


def replays(catalog: Catalog | None = EXACT, slots: int = 2) -> ExpertReplays:
    return ExpertReplays("expert:E", ALONE, catalog, exact_observation, slots=slots)


def check(
    each: ExpertReplays, step: int, queues: list[tuple[Rows, ...]] | None = None
) -> set[Rows]:
    """One check whose replays are all clean; returns the rows that were replayed."""
    planned = each.plan(queues or [each.waiting(8)])  # type: ignore[arg-type]
    for one in planned:
        each.on_result(one, step, clean=True)
    return {one.rows for one in planned if one.rows is not None}


@given(st.booleans(), st.integers(1, 40), st.integers(1, 6))
def test_the_rows_that_replay_a_shape_execute_that_shape(plain: bool, n: int, experts: int) -> None:
    launches = Launches(experts, grouped=False, plain=plain)
    shape = n if plain else (n,)
    assert launches.shapes(launches.rows(shape)) == (shape,) * experts


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).map(tuple))
def test_a_grouped_kernel_executes_its_vector_and_single_kernels_each_count(vector: Rows) -> None:
    assert Launches(len(vector), grouped=True).shapes(vector) == (vector,)
    alone = Launches(len(vector), grouped=False).shapes(vector)
    assert alone == tuple((n,) for n in vector if n)


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_between_two_replays_of_a_representative_lies_one_round_whatever_they_come_to(
    slots: int, size: int, data: st.DataObject
) -> None:
    each = replays(build_catalog(exact_observation((n,)) for n in range(1, size + 1)), slots)
    last = dict.fromkeys(((n, n) for n in range(1, size + 1)), -1)
    for number in range(3 * each.cycle_checks):
        for one in each.plan(()):
            assert one.rows is not None
            assert number - last[one.rows] <= each.cycle_checks
            last[one.rows] = number
            each.on_result(one, number, clean=data.draw(st.booleans()))
    assert min(last.values()) >= 2 * each.cycle_checks - 2


@given(steps, steps)
def test_ranks_with_other_tokens_plan_the_same(
    mine: list[list[Rows]], theirs: list[list[Rows]]
) -> None:
    ranks = [replays(), replays()]
    for step in range(max(len(mine), len(theirs))):
        for each, run in zip(ranks, (mine, theirs), strict=True):
            each.on_calls([(step + 1, r) for r in (run[step] if step < len(run) else ())])
        queues = [each.waiting(2) for each in ranks]
        plans = [each.plan(queues) for each in ranks]
        assert plans[0] == plans[1]
        for each in ranks:
            for one in plans[0]:
                each.on_result(one, step + 1, clean=True)


@given(steps)
def test_all_executed_rows_are_covered_after_enough_checks(run: list[list[Rows]]) -> None:
    each = replays()
    for step, calls in enumerate(run, 1):
        each.on_calls([(step, r) for r in calls])
    for number in range(200):
        if not each.shares.not_yet:
            break
        check(each, len(run) + number)
    assert each.shares.not_yet == 0
    assert each.shares.executed == sum(map(sum, [r for calls in run for r in calls]))


def test_a_cycle_waits_for_what_waited_at_its_start_and_proves_that_much() -> None:
    each = replays(None, slots=1)
    each.on_calls([(1, (5, 0)), (1, (7, 0))])
    each.next_cycle(1, empty=False)
    check(each, 2)
    assert not each.cycle.done
    each.on_calls([(3, (9, 0))])
    check(each, 3)
    assert each.cycle.done
    assert not each.cycle.empty
    assert each.next_cycle(3, empty=False) == 1


def test_with_nothing_waiting_anywhere_a_cycle_proves_all_that_was_executed() -> None:
    each = replays(None)
    each.on_calls([(4, (5, 0))])
    check(each, 6)
    assert each.cycle.empty
    assert each.next_cycle(6, empty=True) == 6


def test_rows_that_nobody_knows_keep_a_cycle_from_proving_anything() -> None:
    each = replays(None)
    each.on_calls([], missed_rows=12)
    assert each.cycle.lost
    each.next_cycle(2, empty=False)
    assert not each.cycle.lost
    assert each.shares.not_yet == 12


def test_what_fails_starves_neither_representatives_nor_executed_shapes() -> None:
    each = replays(slots=1)
    each.on_calls([(1, (40, 48))])
    each.next_cycle(1, empty=False)
    seen: list[Rows | None] = []
    for number in range(12):
        (one,) = each.plan([each.waiting(8)])
        seen.append(one.rows)
        each.on_result(one, number, clean=one.rows not in ((8, 8), (40, 40)))
    assert set(seen[:6]) == {(8, 8), (16, 16), (24, 24), (40, 40), (48, 48)}
    assert seen.count((24, 24)) >= 2
    assert not each.cycle.done


def test_an_executed_shape_that_fails_starves_no_other() -> None:
    each = replays(None, slots=1)
    each.on_calls([(1, (5, 0)), (2, (7, 0))])
    first = each.plan([each.waiting(8)])[0]
    each.on_result(first, 2, clean=False)
    assert each.plan([each.waiting(8)])[0].rows != first.rows


def test_a_retired_shape_is_not_planned_and_covers_nothing() -> None:
    each = replays()
    each.retire(Planned("", (16, 16), (16,), True))
    assert "expert:E 16 rows" not in each.recipes
    each.on_calls([(1, (16, 8))])
    assert (each.shares.catalogue, each.shares.skipped) == (8, 16)
    assert {r for n in range(3) for r in check(each, n)} == {(8, 8), (24, 24)}


def test_with_nothing_to_replay_the_sampled_call_is_replayed_as_it_was() -> None:
    (one,) = replays(None).plan(())
    assert (one.rows, one.recipe) == (None, "expert:E executed rows")


@pytest.mark.parametrize(("proven", "label"), [(9, Label.UNPROVEN), (11, Label.VERIFIED)])
def test_the_gate_takes_executed_rows_as_proof_only_of_the_steps_they_speak_for(
    proven: int, label: Label
) -> None:
    gate = CheckpointGate(2)
    for step in (2, 4):
        gate.on_check(step, "expert:E 8 rows", "clean")
        gate.on_check(step, "expert:E executed rows", "clean")
    gate.on_save(10)
    gate.on_check(12, "expert:E 8 rows", "clean")
    gate.on_check(12, "expert:E executed rows", "clean", proven_step=proven)
    found = gate.verified
    assert (found is not None and found.step == 10) is (label is Label.VERIFIED)
