"""Plain PyTorch: DDP, FSDP2, HSDP and DTensor tensor parallelism over a DeviceMesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scout_core.decision.topology import Coordinate, Topology
from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo, local_of
from scout_core.evidence.isolate import Materialised
from scout_core.integration.framework import (
    FrameworkBase,
    Site,
    StateUnit,
    after_each_step,
)
from scout_core.integration.models import Patterns, find_sites, model_device, plain_name

AXIS_OF_MESH_DIM = {
    "d": ("d", "dp", "ddp", "data", "dp_replicate", "replicate", "data_parallel"),
    "s": ("s", "fsdp", "shard", "dp_shard"),
    "t": ("t", "tp", "tensor", "tensor_parallel"),
    "p": ("p", "pp", "pipeline", "pipeline_parallel"),
    "c": ("c", "cp", "context", "context_parallel"),
    "e": ("e", "ep", "expert", "expert_parallel"),
}
"""Mesh dimension names that are understood, by axis."""


class PyTorch(FrameworkBase):
    """The Framework of a model that the user built and parallelised."""

    name = "pytorch"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | None = None,
        patterns: Patterns | None = None,
    ) -> None:
        """Look at the model; nothing is changed and nothing communicates.

        Raises:
            ScoutError: no parameters, a pattern that matches nothing, or a mesh that cannot be
                mapped to addresses.
        """
        self._model = model
        self._optimizer = optimizer
        self._mesh = root_mesh(mesh if mesh is not None else find_mesh(model))
        self.device = model_device(model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._sites, self._missing = find_sites(inner, patterns or Patterns())
        self._parents = _fsdp_parents(model)

    def topology(self) -> Topology:
        """Addresses from the mesh; without one all ranks are data replicas."""
        if self._mesh is None:
            return Topology.from_coordinates([(rank,) for rank in range(dist.get_world_size())])
        return Topology.from_coordinates(addresses(self._mesh, self._shards_data()))

    def sites(self) -> Sequence[Site]:
        return self._sites

    def uncovered(self) -> Sequence[str]:
        return self._missing

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._optimizer]

    def state_units(self) -> Sequence[StateUnit]:
        return state_units(self._model, self._sites, [self._optimizer])

    def on_step_end(self, hook: Callable[[], None]) -> Undo:
        return after_each_step(self._optimizer, hook)

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

    def _owners(self, module: nn.Module) -> list[FSDPModule]:
        """FSDP modules that hold the module's parameters: below it, itself, or above it."""
        own: list[FSDPModule] = [
            child for child in module.modules() if isinstance(child, FSDPModule)
        ]
        if isinstance(module, FSDPModule) or module not in self._parents:
            return own
        return [*own, self._parents[module]]

    def _shards_data(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self._model.modules())


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
    model: nn.Module, sites: Sequence[Site], optimizers: Sequence[torch.optim.Optimizer]
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
    for name, parameter in model.named_parameters():
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


def find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the widest mesh that a parameter lives on; None when none is a DTensor."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def root_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh that a submesh was cut from."""
    if mesh is None:
        return None
    root = mesh._get_root_mesh()  # checked with torch 2.10 - 2.13
    assert isinstance(root, DeviceMesh)
    return root


def addresses(mesh: DeviceMesh, shards_data: bool) -> list[Coordinate]:
    """Translate mesh positions into addresses, by dimension names.

    Args:
        shards_data: parameters are FSDP-sharded; an unnamed or "dp" mesh of one dimension is then
            a shard axis, an unnamed one of two dimensions replicas x shards.

    Raises:
        ScoutError: an unknown dimension name, two dimensions for one axis, or a mesh that is not
            the whole world.
    """
    axes = _axes(mesh, shards_data)
    world = dist.get_world_size()
    layout = mesh.mesh
    if layout.numel() != world:
        raise ScoutError(
            f"mesh {tuple(layout.shape)} has {layout.numel()} ranks, the job has {world}; "
            "pass mesh= a mesh over all ranks"
        )
    places = [Coordinate()] * world
    for position in torch.cartesian_prod(*(torch.arange(n) for n in layout.shape)).view(world, -1):
        index = tuple(int(i) for i in position)
        places[int(layout[index])] = Coordinate(**dict(zip(axes, index, strict=True)))
    return places


def _axes(mesh: DeviceMesh, shards_data: bool) -> list[str]:
    names = mesh.mesh_dim_names
    if names is None:
        unnamed = {1: ["s"] if shards_data else ["d"], 2: ["d", "s"]}.get(mesh.ndim)
        if unnamed is None or (mesh.ndim == 2 and not shards_data):
            raise ScoutError(
                f"a mesh of shape {tuple(mesh.mesh.shape)} without mesh_dim_names cannot be "
                'mapped to addresses; name its dimensions, as ("dp_replicate", "dp_shard", "tp")'
            )
        return unnamed
    known = {name: axis for axis, spellings in AXIS_OF_MESH_DIM.items() for name in spellings}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ScoutError(
            f"mesh dimension {unknown[0]!r} of {names} is not known; use one of {sorted(known)}"
        )
    axes = [known[name] for name in names]
    if shards_data and "s" not in axes and axes.count("d") == 1:
        axes[axes.index("d")] = "s"  # fully_shard over a mesh called "dp"
    if len(set(axes)) != len(axes):
        raise ScoutError(f"mesh dimensions {names} map to axes {axes}; each axis needs one")
    return axes
