"""Show what a call puts into collectives, in order, backward pass included.

A submodule that communicates inside of its own forward has edges at which its partners are wrong
together; what each of them put into the collective tells them apart (see `decision.origin`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SENDING = {
    "c10d": (
        "allreduce_",
        "allreduce_coalesced_",
        "allgather_",
        "_allgather_base_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "reduce_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "gather_",
        "send",
    ),
    "_c10d_functional": (
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
    ),
}
"""Operators whose input is this rank's own; a broadcast is left out, because only its root sends.
Checked with torch 2.10 - 2.13."""


class Sent(TorchDispatchMode):
    """Calls `show(tensors)` before each collective that is entered inside the block."""

    def __init__(self, show: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._show = show

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if name in _SENDING.get(namespace, ()):
            self._show(_tensors(args[_input_position(func)]))
        return func(*args, **(kwargs or {}))


def _input_position(func: Any) -> int:
    """Find the argument that is sent: called "input..." where there is an output beside it."""
    names = [argument.name for argument in func._schema.arguments]
    return next((i for i, name in enumerate(names) if name.startswith("input")), 0)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Flatten lists of (lists of) tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)]
