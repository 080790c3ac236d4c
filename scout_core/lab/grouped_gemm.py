"""Run the instrumented grouped GEMM: the measurement that `decision.schedule` is checked against.

On the CPU, Triton's interpreter runs the same source, so this needs triton but no GPU.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scout_core.decision.catalog import Observation, Shape
from scout_core.decision.schedule import PATHS, GroupedGemm, Launch, Phase, Role
from scout_core.errors import ScoutError


class Projection(NamedTuple):
    """Forward and backward of one expert projection, and what the device counted."""

    output: Tensor  # (rows, out_features)
    input_gradient: Tensor  # (rows, in_features)
    weight_gradient: Tensor  # (experts, in_features, out_features)
    counters: dict[Phase, Tensor]
    """(programs, roles) int32 of each phase."""


class Operands(NamedTuple):
    """Inputs of a projection; experts' rows stand one after the other."""

    x: Tensor  # (rows, in_features) float32
    weight: Tensor  # (experts, in_features, out_features)
    output_gradient: Tensor  # (rows, out_features)


class TritonProfiler:
    """Observe shapes by running the instrumented kernel on random operands."""

    name = "triton"

    def __init__(self, gemm: GroupedGemm, device: str | torch.device = "cpu") -> None:
        """Prepare; the kernel itself is loaded at the first observation.

        Raises:
            ScoutError: triton is not installed.
        """
        require_triton()
        self._gemm = gemm
        self._device = torch.device(device)

    def observe(self, shape: Shape) -> Observation:
        """Return the counters, summed over programs, under the model's names of paths."""
        operands = random_operands(self._gemm, shape, seed=0)
        moved = Operands(*(tensor.to(self._device) for tensor in operands))
        counters = project(self._gemm, shape, moved).counters
        counts: dict[str, int] = {}
        for phase, table in counters.items():
            counts.update(zip(PATHS[phase], table.sum(dim=0).tolist(), strict=True))
        launches = self._gemm.launches(shape)
        return Observation(shape, "; ".join(each.fingerprint for each in launches), counts)


def require_triton() -> None:
    """Raise a `ScoutError` that says how to get triton, when it is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ScoutError(
            "the instrumented kernel needs the package triton, which is not installed; install it, "
            "or use the schedule model (--source model)"
        )


def random_operands(gemm: GroupedGemm, shape: Shape, seed: int) -> Operands:
    """Draw operands for the rows of a shape."""
    generator = torch.Generator().manual_seed(seed)
    rows = shape if isinstance(shape, int) else sum(shape)
    sizes = ((rows, gemm.in_features), (gemm.experts, gemm.in_features, gemm.out_features))
    return Operands(
        torch.randn(sizes[0], generator=generator),
        torch.randn(sizes[1], generator=generator),
        torch.randn((rows, gemm.out_features), generator=generator),
    )


def project(gemm: GroupedGemm, shape: Shape, operands: Operands) -> Projection:
    """Compute output and gradients of the projection, counting every branch.

    The partial weight gradients of the slices are added in the order of the slices, so the result
    is the same bit for bit on every rank.
    """
    x, weight, dy = operands
    k, n = gemm.in_features, gemm.out_features
    forward, backward, weights = gemm.launches(shape)
    starts = np.cumsum(forward.rows) - forward.rows
    matrix = np.arange(gemm.experts) * k * n
    output = x.new_empty(len(x), n)
    dx = x.new_empty(len(x), k)
    parts = x.new_empty(weights.slices, gemm.experts, k, n)
    counters = {
        Phase.FORWARD: _launch(
            forward, (x, weight, output), (starts * k, matrix, starts * n), (k, 1, n, 1)
        ),
        Phase.INPUT_GRADIENT: _launch(
            backward, (dy, weight, dx), (starts * n, matrix, starts * k), (n, 1, 1, n)
        ),
        Phase.WEIGHT_GRADIENT: _launch(
            weights, (x, dy, parts), (starts * k, starts * n, matrix), (1, k, n, 1)
        ),
    }
    dw = parts[0].clone()
    for part in parts[1:]:
        dw += part
    return Projection(output, dx, dw, counters)


def _launch(
    launch: Launch,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[np.ndarray, np.ndarray, np.ndarray],
    strides: tuple[int, int, int, int],
) -> Tensor:
    """Run one launch and return its counters, (programs, roles).

    Args:
        tensors: A, B and OUT, contiguous.
        offsets: (experts,) each, first element of every expert's A, B and OUT.
        strides: elements from row to row and along the reduction of A, along the reduction and
            from column to column of B.
    """
    from scout_core.lab.grouped_gemm_kernel import kernel

    a, b, out = tensors
    counters = torch.zeros(launch.programs, len(Role), dtype=torch.int32, device=out.device)
    if not launch.programs:
        return counters
    extents = (launch.rows, launch.columns, launch.reduction)
    table = torch.from_numpy(np.stack([*extents, *offsets], axis=1).astype(np.int64))
    kernel(interpreted=not out.is_cuda)[(launch.programs,)](
        a,
        b,
        out,
        counters,
        table.to(out.device),
        len(launch.rows),
        launch.programs,
        *strides,
        out.shape[-1],
        out.stride(0) if launch.slices > 1 else 0,
        TM=launch.tile.rows,
        TN=launch.tile.columns,
        TK=launch.tile.reduction,
        SLICES=launch.slices,
        EVEN=launch.even,
    )
    return counters
