"""How DeepSpeed calls its experts: one tensor, the same capacity for every expert of a call.

`deepspeed.moe.experts.Experts` gets (senders, local experts, capacity, width) and runs its experts
one after the other, each on senders * capacity rows. Checked with DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from scout_core.decision.expert_replay import Rows
from scout_core.evidence.environment import TORCH_KERNEL, TORCH_SETTINGS, kernel_version
from scout_core.evidence.row_log import Counts
from scout_core.integration.expert_calls import Call, ExpertKernels, filled
from scout_deepspeed import zero3

_CAPACITY_DIM = 2


class CapacityCalls:
    """Calls whose rows are read from the shape of their one tensor."""

    def __init__(self, kernels: ExpertKernels, rows_vary: bool) -> None:
        """Prepare.

        Args:
            rows_vary: False when tokens beyond a fixed capacity are dropped.
        """
        self.kernels = kernels
        self.rows_vary = rows_vary

    def counts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Counts, int]:
        """Return the rows of each expert: all senders' capacities together."""
        senders, experts, capacity, _ = _tokens(args, kwargs).shape
        return [senders * capacity] * experts, senders * experts * capacity

    def resized(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Rows) -> Call:
        """Repeat or cut the capacity; experts of one call have equal rows."""
        tokens = _tokens(args, kwargs)
        senders, _, had, _ = tokens.shape
        if len(set(rows)) > 1 or rows[0] % senders:
            raise ValueError(f"DeepSpeed's experts cannot have {list(rows)} rows in one call")
        wants = rows[0] // senders
        index = [i % had for i in range(wants)] if had else []
        return (filled(tokens, index, wants, _CAPACITY_DIM),), {}


def calls_of(experts: nn.Module, layer: nn.Module) -> CapacityCalls | None:
    """Return how a group of experts inside a layer is called; None for experts of another kind."""
    for module in layer.modules():
        if isinstance(module, MOELayer) and module.experts is experts:
            kernels = _kernels_of(experts, module.ep_size)
            vary = not module.gate.drop_tokens
            return None if kernels is None else CapacityCalls(kernels, vary)
    return None


def _kernels_of(experts: Experts, senders: int) -> ExpertKernels | None:
    matrices = [p for p in experts.deepspeed_experts[0].parameters() if _rank(p) == 2]
    version = kernel_version(TORCH_KERNEL)
    if not matrices or version is None:
        return None
    out_features, in_features = zero3.whole_shape(matrices[0])
    return ExpertKernels(
        library=TORCH_KERNEL,
        version=version,
        settings=TORCH_SETTINGS,
        dtype=str(matrices[0].dtype).removeprefix("torch."),
        in_features=in_features,
        out_features=out_features,
        num_experts=experts.num_local_experts,
        row_alignment=senders,
    )


def _rank(parameter: nn.Parameter) -> int:
    return len(zero3.whole_shape(parameter))


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    tokens: torch.Tensor = args[0] if args else kwargs["inputs"]
    return tokens
