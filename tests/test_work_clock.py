"""Timing this rank's own work: whose calls count, and that nothing is left behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scout_core.evidence import work_clock
from scout_core.evidence.capture import around_calls, before_calls
from scout_core.evidence.work_clock import MOST_MICRO_BATCHES, StepWork, WorkClock

CPU = torch.device("cpu")


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(count))


def run(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in model:
        x = block(x)
    return x


def window(model: nn.ModuleList, micro_batches: list[list[int]]) -> list[StepWork]:
    """Time steps whose micro-batches have the given lengths."""
    clock = WorkClock(list(model), CPU)
    clock.open()
    for number, lengths in enumerate(micro_batches):
        if number:
            clock.next_step()
        for length in lengths:
            run(model, torch.randn(2, length, 8)).sum().backward()
    return clock.close()


def test_each_micro_batch_is_timed_with_its_positions() -> None:
    lengths = [[random.randint(1, 9) for _ in range(random.randint(1, 4))] for _ in range(3)]
    steps = window(blocks(), lengths)
    assert [step.tokens for step in steps] == [[2 * n for n in each] for each in lengths]
    for step in steps:
        assert len(step.seconds) == len(step.tokens)
        assert min(step.seconds) > 0
        assert 0 <= step.loading_s <= step.wall_s


def test_token_ids_count_as_they_are_and_a_vector_is_not_known() -> None:
    model = nn.ModuleList([nn.Embedding(5, 4)])
    clock = WorkClock(list(model), CPU)
    clock.open()
    model[0](torch.zeros(3, 7, dtype=torch.long))
    model[0](torch.zeros(3, dtype=torch.long))
    assert clock.close()[0].tokens == [21, 0]


def test_recomputed_and_evaluated_calls_do_not_count() -> None:
    model = blocks()
    clock = WorkClock(list(model), CPU)
    clock.open()
    x = torch.randn(2, 3, 8, requires_grad=True)
    checkpoint(run, model, x, use_reentrant=False).sum().backward()
    model.eval()
    run(model, x)
    (step,) = clock.close()
    assert len(step.seconds) == 1


def test_only_the_first_micro_batches_of_a_step_are_timed() -> None:
    (step,) = window(blocks(1), [[1] * (MOST_MICRO_BATCHES + 3)])
    assert len(step.seconds) == MOST_MICRO_BATCHES


def test_a_pause_of_the_interpreter_is_measured_and_is_not_loading() -> None:
    model = blocks(1)
    clock = WorkClock(list(model), CPU)
    clock.open()
    for _ in range(3):
        gc.collect()
    run(model, torch.randn(1, 1, 8))
    (step,) = clock.close()
    assert step.paused_s > 0
    assert step.paused_s + step.loading_s <= step.wall_s


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_left_behind_whatever_else_watches(compiled: bool) -> None:
    model = blocks(2)
    if compiled:
        for block in model:
            block.compile(backend="eager")
    before = [block._compiled_call_impl for block in model]
    callbacks = list(gc.callbacks)
    clock, seen = WorkClock(list(model), CPU), []
    first = before_calls(model[0], lambda module, args, kwargs: seen.append("first"))
    clock.open()
    last = around_calls(model[0], lambda *_: "begun", lambda result: seen.append(result))
    run(model, torch.randn(1, 1, 8))
    first()
    assert len(clock.close()[0].seconds) == 1
    run(model, torch.randn(1, 1, 8))
    last()
    assert seen == ["first", "begun", "begun"]
    assert [block._compiled_call_impl for block in model] == before
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model)
    assert gc.callbacks == callbacks


def test_an_error_in_a_hook_ends_the_window_and_never_the_training() -> None:
    class Odd(nn.Module):
        def forward(self, x: object) -> object:
            return x

    class Unreadable:
        @property
        def __class__(self) -> type:
            raise RuntimeError("not to be looked at")

    model = Odd()
    clock = WorkClock([model], CPU)
    clock.open()
    thing = Unreadable()
    assert model(thing) is thing
    with pytest.raises(RuntimeError, match="not to be looked at"):
        clock.close()
    assert not clock.is_open


def test_an_error_after_a_forward_pass_ends_the_window_and_never_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(device: torch.device) -> Callable[[], Callable[[], float]]:
        def end() -> Callable[[], float]:
            raise RuntimeError("no event left")

        return end

    monkeypatch.setattr(work_clock, "_start", start)
    model = blocks(1)
    clock = WorkClock(list(model), CPU)
    clock.open()
    assert run(model, torch.randn(1, 1, 8)).shape == (1, 1, 8)
    with pytest.raises(RuntimeError, match="no event left"):
        clock.close()


def test_training_is_the_same_bit_by_bit() -> None:
    results = []
    for timed in (False, True):
        torch.manual_seed(0)
        model = blocks()
        x = torch.randn(2, 5, 8)
        clock = WorkClock(list(model), CPU)
        if timed:
            clock.open()
        run(model, x).sum().backward()
        clock.drop()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
