"""Calls of expert stages: their rows are read, and resized to any others, deterministically."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scout_core.decision.expert_replay import Rows
from scout_core.evidence.capture import take_apart
from scout_core.evidence.row_log import RowLog
from scout_core.integration.expert_calls import (
    ExpertKernels,
    PackedCalls,
    captured_rows,
    filled,
    resized,
    source_rows,
)

KERNELS = ExpertKernels("library", "1", "settings", "float32", 4, 8, num_experts=3)
vectors = st.lists(st.integers(0, 9), min_size=3, max_size=3).map(tuple)


class Stage(nn.Module):
    def forward(
        self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor | None = None
    ) -> torch.Tensor:
        return tokens


CALLS = PackedCalls(Stage(), KERNELS, per_row=["probs"])


def tokens_of(rows: Rows, padding: int = 0) -> torch.Tensor:
    """Each row tells its expert (hundreds) and its number among that expert's rows."""
    numbers = [100 * e + i for e, n in enumerate(rows) for i in range(n)]
    return torch.tensor([[float(n)] for n in numbers + [-1] * padding]).reshape(-1, 1)


@given(vectors, vectors, st.integers(0, 3))
def test_a_resized_call_has_the_planned_rows_of_each_experts_own(
    old: Rows, new: Rows, padding: int
) -> None:
    tokens = tokens_of(old, padding).requires_grad_()
    args, _ = CALLS.resized((tokens, torch.tensor(old), tokens.detach()), {}, new)
    made, counts, probs = args
    assert counts.tolist() == list(new)
    assert made.requires_grad
    assert made.shape == (sum(new), 1)
    if sum(old):
        assert torch.equal(made.detach(), probs)
        owners = [e for e, n in enumerate(new) for _ in range(n)]
        for value, owner in zip(made[:, 0].tolist(), owners, strict=True):
            assert value >= 0  # no padding
            assert int(value) // 100 == owner or old[owner] == 0


@given(vectors, vectors)
def test_a_resized_call_is_the_same_on_every_rank(old: Rows, new: Rows) -> None:
    made = [
        CALLS.resized((tokens_of(old), torch.tensor(old), tokens_of(old)), {}, new)[0]
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@given(vectors)
def test_the_same_rows_leave_a_call_as_it_was(old: Rows) -> None:
    made = CALLS.resized((tokens_of(old), torch.tensor(old), tokens_of(old)), {}, old)[0]
    assert torch.equal(made[0], tokens_of(old))


def test_an_expert_without_rows_takes_those_of_the_others() -> None:
    assert source_rows((2, 0, 1), (1, 4, 0)) == [0, 0, 1, 2, 0]


def test_a_call_without_any_rows_is_filled_with_finite_stand_ins() -> None:
    made = filled(torch.empty(0, 4), [], 5)
    assert made.shape == (5, 4)
    assert bool(torch.isfinite(made).all())
    assert torch.equal(made, filled(torch.empty(0, 4), [], 5))


def test_named_arguments_and_lists_of_counts_are_read_too() -> None:
    call = {"counts": [2, 1, 0], "tokens": tokens_of((2, 1, 0), padding=2)}
    assert CALLS.counts((), call) == ([2, 1, 0], 5)
    args, kwargs = PackedCalls(Stage(), KERNELS).resized((), call, (1, 1, 1))
    assert (args[1] if len(args) > 1 else kwargs["counts"]) == [1, 1, 1]


def test_captured_arguments_are_resized_and_keep_which_tensors_need_gradients() -> None:
    tokens = tokens_of((1, 2, 3)).requires_grad_()
    arguments = take_apart((tokens, torch.tensor([1, 2, 3])), {})
    calls = PackedCalls(Stage(), KERNELS)
    made = resized(calls, arguments, (4, 4, 4))
    assert captured_rows(calls, arguments) == (1, 2, 3)
    assert captured_rows(calls, made) == (4, 4, 4)
    assert (made.needs_grad, made.skeleton) == (arguments.needs_grad, arguments.skeleton)


def test_a_log_gives_back_the_rows_of_each_call_with_its_step() -> None:
    log = RowLog(2)
    log.add(1, [3, 4], 7)
    log.add(2, torch.tensor([5, 6], dtype=torch.int32), 11)
    assert log.take().calls == [(1, (3, 4)), (2, (5, 6))]
    assert log.take().calls == []
    assert log.seen == 2


def test_calls_beyond_the_capacity_are_counted_in_rows() -> None:
    log = RowLog(1, capacity_calls=2)
    for rows in (1, 2, 4, 8):
        log.add(1, [rows], rows)
    taken = log.take()
    assert ([rows for _, rows in taken.calls], taken.missed_rows) == ([(1,), (2,)], 12)
    log.add(2, [5], 5)
    assert log.take() == ([(2, (5,))], 0)


def test_a_wrong_number_of_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 row counts for 2"):
        RowLog(2).add(1, [1, 2, 3], 6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_on_a_gpu_are_kept_without_waiting_for_it() -> None:
    log = RowLog(2, capacity_calls=64)
    counts = [torch.tensor([i, 2 * i], device="cuda") for i in range(50)]
    log.add(1, counts[0], 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, each in enumerate(counts[1:], 2):
            log.add(step, each, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert log.take().calls == [(i + 1, (i, 2 * i)) for i in range(50)]
