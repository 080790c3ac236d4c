"""Attention masks that are made from local data travel with the call that is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.evidence.capture import take_apart

flex = pytest.importorskip("torch.nn.attention.flex_attention")
LENGTH = 24
documents = st.lists(st.integers(1, 9), min_size=3, max_size=8)


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def same_document(number: torch.Tensor, window: int) -> Callable[..., Any]:
    """A mask that closes over a tensor and a constant, as torchtitan's document masks do."""

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (number[query] == number[key]) & (query - key < window)

    return mask


def mask_of(lengths: list[int], window: int = LENGTH) -> Any:
    """The block mask of documents of these lengths, one after the other."""
    numbers = [i for i, length in enumerate(lengths) for _ in range(length)]
    padded = torch.tensor((numbers + [99] * LENGTH)[:LENGTH])
    rule = flex.and_masks(causal, same_document(padded, window))
    return flex.create_block_mask(rule, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)


def dense(mask: Any) -> torch.Tensor:
    """What the mask's function says of every query and key."""
    every: torch.Tensor = flex.create_mask(mask.mask_mod, 1, 1, LENGTH, LENGTH, device="cpu")
    return every


@settings(max_examples=15)
@given(documents, documents, st.integers(2, LENGTH))
def test_a_receiver_that_is_given_the_sources_tensors_masks_as_the_source(
    ours: list[int], theirs: list[int], window: int
) -> None:
    mine, source = take_apart((mask_of(ours),), {}), take_apart((mask_of(theirs, window),), {})
    assert (mine.skeleton, mine.unknown) == (source.skeleton, "")
    (rebuilt,), _ = mine.rebuild(source.tensors, source.constants)
    wanted = mask_of(theirs, window)
    assert torch.equal(dense(rebuilt), dense(wanted))
    assert torch.equal(rebuilt.to_dense(), wanted.to_dense())


def test_the_copy_shares_no_tensor_with_the_mask_of_the_training_step() -> None:
    mask = mask_of([5, 7])
    taken = take_apart((mask,), {})
    before = dense(mask).clone()
    for tensor in taken.tensors:
        tensor.zero_()
    assert torch.equal(dense(mask), before)


def test_masks_of_other_definitions_are_other_work() -> None:
    one = take_apart((causal,), {})
    other = take_apart((same_document(torch.zeros(3), 2),), {})
    assert one.skeleton != other.skeleton


def test_a_function_that_closes_over_a_module_cannot_be_compared() -> None:
    layer = torch.nn.Linear(2, 2)
    assert take_apart((lambda x: layer(x),), {}).unknown == "Linear"
