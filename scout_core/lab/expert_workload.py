"""Experts computed by torch, one matrix product each: what the outside profiler observes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scout_core.decision.catalog import Shape
from scout_core.decision.schedule import GroupedGemm


def torch_experts(
    gemm: GroupedGemm, dtype: torch.dtype, device: torch.device
) -> Callable[[Shape], Callable[[], object]]:
    """Return what allocates the operands of a shape and returns its forward and backward."""

    def prepare(shape: Shape) -> Callable[[], object]:
        rows = (shape,) if isinstance(shape, int) else shape
        weights = [
            torch.ones(gemm.in_features, gemm.out_features, dtype=dtype, device=device)
            for _ in rows
        ]
        inputs = [torch.ones(n, gemm.in_features, dtype=dtype, device=device) for n in rows]
        leaves = [tensor.requires_grad_() for tensor in (*inputs, *weights)]
        gradients = [torch.ones(n, gemm.out_features, dtype=dtype, device=device) for n in rows]

        def work() -> object:
            outputs = [x @ w for x, w in zip(inputs, weights, strict=True)]
            return torch.autograd.grad(outputs, leaves, gradients)

        return work

    return prepare
