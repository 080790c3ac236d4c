"""The translation between torchtitan's Trainer and SCOUT: sites, addresses, step boundary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, OptimizersInBackwardContainer
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts

from scout_core.decision.topology import Topology
from scout_core.evidence.capture import Undo
from scout_core.evidence.environment import (
    TORCH_GROUPED_KERNEL,
    TORCH_KERNEL,
    TORCH_SETTINGS,
    kernel_version,
)
from scout_core.integration.expert_calls import ExpertKernels, PackedCalls
from scout_core.integration.expert_sites import with_experts
from scout_core.integration.framework import Site, StateUnit, after_each_step
from scout_core.integration.fsdp2 import ShardedByFSDP2, state_units
from scout_core.integration.models import (
    Patterns,
    find_sites,
    path_class,
    plain_name,
    unwrapped,
)
from scout_core.integration.restore_state import TrainingState
from scout_torchtitan.addresses import check_against_meshes, topology_of

LAYERS = r"(^|\.)layers\.[^.]+$"
"""torchtitan's models keep their transformer blocks in a dict of this name."""


class TorchTitan(ShardedByFSDP2):
    """The Framework of a torchtitan Trainer; `model_parts` are its local pipeline stages."""

    name = "torchtitan"

    def __init__(self, trainer: Any, patterns: Patterns) -> None:
        """Look at the trainer; nothing is changed and nothing communicates.

        Args:
            trainer: a `torchtitan.train.Trainer` with model, optimizers and meshes.

        Raises:
            ScoutError: a pattern that matches nothing, or meshes that SCOUT cannot address.
        """
        super().__init__(trainer.model_parts)
        self.device: torch.device = trainer.device
        self._dims = trainer.parallel_dims
        self._optimizers: OptimizersContainer = trainer.optimizers
        self._topology = topology_of(self._dims)
        check_against_meshes(self._dims, self._topology, dist.get_rank())
        self._sites: list[Site] = []
        self._missing: list[str] = []
        for part in trainer.model_parts:
            sites, missing = find_sites(part, _for_part(patterns, part, self._dims.pp > 1))
            dtype = trainer.job_config.training.mixed_precision_param
            experts = [*_expert_sites(part, self._dims.ep, dtype)] if self._dims.ep > 1 else []
            self._sites += with_experts(sites, experts)
            self._missing += missing

    def topology(self) -> Topology:
        return self._topology

    def sites(self) -> Sequence[Site]:
        return self._sites

    def uncovered(self) -> Sequence[str]:
        return self._missing

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return list(self._optimizers)

    def training_state(self) -> TrainingState | None:
        return None  # torchtitan writes its own checkpoints, see `checkpoints`

    def state_units(self) -> Sequence[StateUnit]:
        return state_units(self._models, self._sites, self.optimizers())

    def before_update(self, hook: Callable[[], None]) -> Undo:
        if isinstance(self._optimizers, OptimizersInBackwardContainer):
            return lambda: None  # parameters are updated one by one inside of the backward pass
        undo: Undo = self._optimizers.register_step_pre_hook(lambda *_: hook()).remove
        return undo

    def on_step_end(self, hook: Callable[[], None]) -> Undo:
        # The container steps once per optimizer step, whatever number of optimizers it holds.
        return after_each_step(self._optimizers, hook)


def _for_part(patterns: Patterns, part: nn.Module, stage: bool) -> Patterns:
    """Find torchtitan's layers by their name: a stage may have a single one."""
    layers = patterns.layers
    named = any(re.search(LAYERS, plain_name(name)) for name, _ in part.named_modules())
    if layers is None and named:
        layers = LAYERS
    return replace(patterns, layers=layers, stage=stage)


def _expert_sites(part: nn.Module, degree: int, dtype: str) -> Iterator[Site]:
    """Yield the experts of each MoE layer: what a rank computes between dispatch and combine."""
    for name, module in part.named_modules():
        if isinstance(module, GroupedExperts) and unwrapped(module) is module:
            calls = PackedCalls(module, kernels_of(module, degree, dtype))
            kind = path_class(module, "expert")
            yield Site(plain_name(name), module, "expert", kind, "expert", experts=calls)


def kernels_of(experts: GroupedExperts, degree: int, dtype: str) -> ExpertKernels:
    """Say who computes the experts of a layer on this rank.

    Args:
        degree: ranks that the experts are split over.
        dtype: of the gathered parameters.
    """
    _, hidden, width = experts.w1.shape
    grouped = experts.use_grouped_mm
    library = TORCH_GROUPED_KERNEL if grouped else TORCH_KERNEL
    version = kernel_version(library)
    assert version is not None
    return ExpertKernels(
        library=library,
        version=version,
        settings="one launch for all experts" if grouped else TORCH_SETTINGS,
        dtype="bfloat16" if grouped else dtype,  # the grouped kernel casts its operands
        in_features=width,
        out_features=hidden,
        num_experts=experts.num_experts // degree,
        grouped=grouped,
        row_alignment=moe_utils.TOKEN_GROUP_ALIGN_SIZE_M,
    )
