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
from torchtitan.models.moe.moe import GroupedExperts

from scout_core.decision.topology import Topology
from scout_core.evidence.capture import Undo
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
            experts = [*_expert_sites(part)] if self._dims.ep > 1 else []
            apart = {site.module for site in experts}
            self._sites += experts
            self._sites += [replace(site, apart=_names(site.module, apart)) for site in sites]
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


def _expert_sites(part: nn.Module) -> Iterator[Site]:
    """Yield the experts of each MoE layer: what a rank computes between dispatch and combine.

    The output of a whole MoE layer mixes the work of all ranks of its expert group; this names one.
    """
    for name, module in part.named_modules():
        if isinstance(module, GroupedExperts) and unwrapped(module) is module:
            kind = path_class(module, "expert")
            yield Site(plain_name(name), module, "expert", kind, "expert")


def _names(module: nn.Module, inside: set[nn.Module]) -> tuple[str, ...]:
    """Prefixes, in `module`, of the parameters of the modules that lie inside of it."""
    return tuple(f"{name}." for name, child in module.named_modules() if child in inside)
