"""Rotation, qualification, cost: what a check replays and what may be compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.cost import Plan, cost_of
from scout_core.decision.evidence import Signature
from scout_core.decision.qualification import Qualification, unrepeatable, why_not_reproducible
from scout_core.decision.replay_verdict import Report
from scout_core.decision.rotation import AUDIT, Rotation, expected_latency_steps, is_due, merge
from scout_core.errors import ScoutError

NAMES = st.lists(
    st.sampled_from(["hidden:A", "hidden:B", "expert:E", "embedding", "head", "optimizer"]),
    unique=True,
    min_size=1,
)


@given(NAMES, st.integers(0, 50))
def test_every_recipe_has_its_turn_within_one_cycle(names: list[str], start: int) -> None:
    rotation = Rotation(tuple(names))
    seen = {
        turn.recipe
        for check in range(start, start + rotation.cycle_checks)
        for turn in rotation.turns(check)
    }
    assert seen == set(names)


@given(NAMES)
def test_the_rounds_of_a_recipe_count_up_by_one(names: list[str]) -> None:
    rotation = Rotation(tuple(names))
    rounds: dict[str, list[int]] = {}
    for check in range(30):
        for turn in rotation.turns(check):
            rounds.setdefault(turn.recipe, []).append(turn.round)
    assert all(seen == list(range(len(seen))) for seen in rounds.values())


def test_a_check_times_a_repeated_layer_and_replays_one_other_recipe() -> None:
    turns = Rotation(("hidden:A", "embedding", "optimizer")).turns(3)
    assert [(turn.recipe, turn.timed) for turn in turns] == [
        ("hidden:A", True),
        ("optimizer", False),
    ]


def test_experts_have_a_turn_of_their_own_beside_hidden_layers() -> None:
    rotation = Rotation(("hidden:A", "hidden:B", "expert:E", "optimizer"))
    for check in range(4):
        kinds = [(turn.recipe.split(":")[0], turn.timed) for turn in rotation.turns(check)]
        assert kinds == [("hidden", True), ("expert", check % 2 == 0), ("optimizer", False)]


def test_without_repeated_layers_the_others_are_timed() -> None:
    assert [turn.timed for turn in Rotation(("embedding", "head")).turns(0)] == [True]


def test_with_nothing_to_replay_state_is_audited_still() -> None:
    assert [turn.recipe for turn in Rotation(()).turns(2)] == [AUDIT]


def test_the_catalogue_joins_the_recipes_of_all_stages_in_order() -> None:
    assert merge([["embedding", "hidden:A"], ["hidden:A", "head"]]).recipes == (
        "embedding",
        "hidden:A",
        "head",
    )


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(ScoutError, match="one turn"):
        Rotation(("head", "head"))


@given(st.integers(1, 200), st.integers(1, 50))
def test_checks_come_once_per_interval(step: int, interval: int) -> None:
    assert sum(is_due(s, interval) for s in range(step, step + interval)) == 1


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 20))
def test_the_expected_latency_is_the_mean_over_all_first_steps(
    interval: int, turns: int, sites: int
) -> None:
    period = interval * turns * sites
    waits = [period - start for start in range(period)]  # the fault's layer is due at the end
    assert expected_latency_steps(interval, turns, sites) == sum(waits) / period


def test_the_papers_example_costs_0_3_percent() -> None:
    assert cost_of(Plan(layers=50, interval_steps=20, variants=3)).overhead == pytest.approx(0.003)


@pytest.mark.parametrize("field", ["layers", "interval_steps", "variants", "step_s"])
def test_a_plan_of_nothing_is_refused_by_name(field: str) -> None:
    values = {"layers": 4, "interval_steps": 2, "variants": 3, "step_s": 1.0, field: 0}
    with pytest.raises(ScoutError, match=f"{field}=0"):
        Plan(**values)  # type: ignore[arg-type]


def held(*values: int) -> dict[int, Report]:
    return {rank: Report(state={"w": Signature(v, "xxh3")}) for rank, v in enumerate(values)}


def test_state_is_armed_when_replicas_are_equal_at_first_sight() -> None:
    known = Qualification().with_units(held(1, 1, 1), [(0, 1, 2)])
    assert (known.units, known.differing_units) == ({"w"}, set())


def test_state_that_differs_at_first_sight_is_never_armed() -> None:
    known = Qualification().with_units(held(1, 2, 1), [(0, 1, 2)])
    again = known.with_units(held(1, 1, 1), [(0, 1, 2)])
    assert (again.units, again.differing_units) == (set(), {"w"})


def test_armed_state_stays_armed_when_it_differs_later() -> None:
    known = Qualification().with_units(held(1, 1, 1), [(0, 1, 2)])
    assert known.with_units(held(1, 2, 1), [(0, 1, 2)]).units == {"w"}


def replayed(*repeatable: bool) -> dict[int, Report]:
    return {rank: Report(repeatable=value) for rank, value in enumerate(repeatable)}


def test_one_rank_that_disagrees_with_itself_keeps_a_recipe_from_being_armed() -> None:
    assert "ranks [1]" in why_not_reproducible(False, replayed(True, False, True))


def test_an_armed_recipe_keeps_a_minority_that_disagrees_with_itself_as_evidence() -> None:
    assert why_not_reproducible(True, replayed(True, False, True)) == ""
    assert why_not_reproducible(True, replayed(False, False, True)) != ""


def test_reproducible_ranks_need_no_reason() -> None:
    assert unrepeatable(replayed(True, True)) == ()
    assert why_not_reproducible(False, replayed(True, True)) == ""
