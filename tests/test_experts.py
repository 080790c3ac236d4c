"""Expert stages: calls are logged, replays agreed, cycles end on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scout_core.decision.catalog import build_catalog, exact_observation
from scout_core.decision.expert_replay import ExpertReplays, Launches, Rows
from scout_core.evidence.exchange import LocalExchange, run_threads
from scout_core.integration.expert_calls import ExpertKernels, PackedCalls
from scout_core.integration.expert_facts import ExpertClass
from scout_core.integration.experts import Ended, Experts
from scout_core.integration.framework import Site

NAME, OTHER = "expert:Stage", "expert:Elsewhere"
KERNELS = ExpertKernels("library", "1", "settings", "float32", 2, 2, num_experts=2)
RECIPE = f"{NAME} executed rows"


class Stage(nn.Module):
    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return tokens * 2


class Rank:
    """One rank with one expert stage, or with none."""

    def __init__(self, exchange: LocalExchange, has_stage: bool = True, compiled: str = "") -> None:
        self.stage = Stage()
        if compiled == "in place":
            self.stage.compile(backend="eager")
        calls = PackedCalls(self.stage, KERNELS)
        site = Site("experts", self.stage, "expert", NAME, "expert", experts=calls)
        catalog = build_catalog(exact_observation((n,)) for n in (8, 16))
        replays = ExpertReplays(NAME, Launches(2, False), catalog, exact_observation, slots=1)
        classes = {NAME: ExpertClass("a catalogue", replays=replays), OTHER: ExpertClass("calls")}
        self.errors: list[Exception] = []
        sites = [site] if has_stage else []
        self.step = 1
        self.experts = Experts(sites, classes, exchange, self.errors.append, lambda: self.step)

    def call(self, *rows: Rows) -> None:
        for each in rows:
            self.stage(torch.zeros(sum(each), 2), torch.tensor(each))
        self.step += 1

    def check(self, bad: Rows = ()) -> tuple[set[Any], Ended]:
        """Plan, replay nothing, and say that all but the bad rows were clean."""
        planned = self.experts.plan(NAME, was_called=True)
        for each in planned:
            self.experts.on_result(NAME, each, self.step - 1, clean=each.rows != bad)
        return {each.rows for each in planned}, self.experts.end(NAME, self.step - 1)


def on(world: int, body: Callable[[Rank, int], Any], **options: Any) -> list[Any]:
    return run_threads(world, lambda exchange: body(Rank(exchange, **options), exchange.rank))


def test_what_one_rank_waits_for_all_of_them_replay() -> None:
    def body(rank: Rank, number: int) -> Any:
        rank.call((40, 8) if number == 1 else (8, 8))
        return rank.check()[0]

    assert on(3, body) == [{(40, 40)}] * 3


def test_a_cycle_ends_on_all_ranks_when_the_last_of_them_is_through() -> None:
    def body(rank: Rank, number: int) -> Any:
        rank.call((40, 8) if number == 0 else (8, 8))
        bad = [rank.check(bad=(40, 40))[1].proven_step for _ in range(10)]
        good = [rank.check()[1].proven_step for _ in range(4)]
        return bad, good

    mine, theirs = on(2, body)
    assert mine == theirs
    bad, good = mine
    assert [step for step in bad if step is not None] == [0]  # the cycle that began before the call
    assert next(step for step in good if step is not None) == 1


def test_ranks_without_a_stage_plan_the_same() -> None:
    def body(exchange: LocalExchange) -> Any:
        rank = Rank(exchange, has_stage=exchange.rank != 1)
        if exchange.rank != 1:
            rank.call((40, 8))
        return [rank.check()[0] for _ in range(3)]

    plans = run_threads(3, body)
    assert plans[0] == plans[1] == plans[2]
    assert {(40, 40)} in plans[1]


@pytest.mark.parametrize("compiled", ["", "in place"])
def test_calls_are_counted_but_not_those_of_scout(compiled: str) -> None:
    def body(rank: Rank, number: int) -> Any:
        rank.call((3, 4))
        rank.experts.counting = False
        rank.call((100, 100))
        rank.experts.counting = True
        rank.check()
        rank.experts.close()
        rank.call((5, 5))
        return [each.shares for each in rank.experts.coverage()]

    ((shares, other),) = on(1, body, compiled=compiled)
    assert shares is not None
    assert shares.executed == 7
    assert other is None


def test_a_call_on_a_device_is_logged_without_reading_it() -> None:
    def body(rank: Rank, number: int) -> Any:
        # Tensors of the meta device have no values: whoever reads one raises.
        rank.stage(torch.zeros(7, 2, device="meta"), torch.tensor([3, 4], device="meta"))
        log = rank.experts._logs[NAME]
        return log.seen, rank.errors, rank.experts.counting

    assert on(1, body) == [(1, [], True)]


def test_calls_that_no_hook_sees_are_said_once_and_leave_the_catalogue() -> None:
    def body(rank: Rank, number: int) -> Any:
        if number == 0:
            rank.call((8, 8))
        ends = [rank.check()[1] for _ in range(2)]
        return ends, rank.experts.recipes(NAME), [e.gap for e in rank.experts.coverage()]

    (mine, theirs) = on(2, body)
    for ends, recipes, _ in (mine, theirs):
        assert bool(ends[0].lost)
        assert not ends[1].lost
        assert RECIPE not in recipes
        assert f"{NAME} 8 rows" in recipes
    assert "compiled code" in theirs[2][0]
    assert "another rank" in mine[2][0]


def test_a_call_that_cannot_be_read_disturbs_nobody() -> None:
    def body(rank: Rank, number: int) -> Any:
        rank.stage(torch.zeros(3, 2), torch.tensor([1, 1, 1]))
        out = rank.stage(torch.ones(3, 2), torch.tensor([1, 1, 1]))
        return out.sum().item(), len(rank.errors)

    assert on(1, body) == [(12.0, 1)]


def test_other_classes_keep_the_recipe_of_their_path_class() -> None:
    def body(rank: Rank, number: int) -> Any:
        experts = rank.experts
        return experts.plans(OTHER), experts.recipes(OTHER), experts.cycle_checks([NAME, OTHER])

    assert on(1, body) == [(False, (OTHER,), 4)]
