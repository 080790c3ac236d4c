"""Parameters that FSDP2 shards: how to make them whole, and what replicas hold alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from scout_core.evidence.capture import local_of
from scout_core.evidence.isolate import Materialised
from scout_core.integration.framework import FrameworkBase, Site, StateUnit
from scout_core.integration.models import plain_name


class ShardedByFSDP2(FrameworkBase):
    """The part of a Framework that is the same wherever `fully_shard` was used, or was not."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Find the FSDP modules of the models (pipeline stages of one rank, or one model)."""
        self._models = tuple(models)
        self._parents: dict[nn.Module, FSDPModule] = {}
        for model in models:
            self._parents |= _fsdp_parents(model)

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[Materialised]:
        """Gather FSDP2 shards by FSDP's own `unshard`; other parameters are whole already."""
        owners = self._owners(module)
        for owner in owners:
            owner.reshard()  # a copy kept from the backward pass would hide a bad shard
        for owner in owners:
            owner.unshard()
        try:
            yield {}
        finally:
            for owner in owners:
                owner.reshard()

    def is_sharded(self, module: nn.Module) -> bool:
        return bool(self._owners(module))

    @property
    def shards_data(self) -> bool:
        """Some parameter is sharded by FSDP2."""
        return any(isinstance(m, FSDPModule) for model in self._models for m in model.modules())

    def _owners(self, module: nn.Module) -> list[FSDPModule]:
        """FSDP modules that hold the module's parameters: below it, itself, or above it."""
        own: list[FSDPModule] = [
            child for child in module.modules() if isinstance(child, FSDPModule)
        ]
        if isinstance(module, FSDPModule) or module not in self._parents:
            return own
        return [*own, self._parents[module]]


def _fsdp_parents(model: nn.Module) -> dict[nn.Module, FSDPModule]:
    """For each module below an FSDP module, the nearest one above it."""
    parents: dict[nn.Module, FSDPModule] = {}

    def walk(module: nn.Module, above: FSDPModule | None) -> None:
        if above is not None:
            parents.setdefault(module, above)
        here = module if isinstance(module, FSDPModule) else above
        for child in module.children():
            walk(child, here)

    walk(model, None)
    return parents


def state_units(
    models: Sequence[nn.Module],
    sites: Sequence[Site],
    optimizers: Sequence[torch.optim.Optimizer],
) -> list[StateUnit]:
    """Group all parameters, and their optimizer state, into one unit per site plus the rest.

    The state is read now: FSDP's shards when it is idle, DTensors' local parts.
    """
    owner: dict[nn.Parameter, str] = {}
    for site in sites:
        for parameter in site.module.parameters():
            owner.setdefault(parameter, site.name)
    units: dict[str, list[tuple[str, torch.Tensor]]] = {}
    layouts = {site.name: site.layout for site in sites}
    for name, parameter in (named for model in models for named in model.named_parameters()):
        unit = units.setdefault(owner.get(parameter, "rest"), [])
        unit.append((plain_name(name), local_of(parameter.detach())))
        for optimizer in optimizers:
            unit += [
                (f"{plain_name(name)}.{key}", local_of(value))
                for key, value in sorted(optimizer.state.get(parameter, {}).items())
                if isinstance(value, torch.Tensor)
            ]
    return [
        StateUnit(name, tuple(tensors), layouts.get(name, "dense"))
        for name, tensors in units.items()
    ]
