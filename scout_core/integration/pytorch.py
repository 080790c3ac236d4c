"""Plain PyTorch: DDP, FSDP2, HSDP and DTensor tensor parallelism over a DeviceMesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scout_core.decision.topology import Coordinate, Topology
from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo
from scout_core.integration.expert_sites import as_data_ranks, find_experts, with_experts
from scout_core.integration.framework import Site, StateUnit, after_each_step
from scout_core.integration.fsdp2 import ShardedByFSDP2, state_units
from scout_core.integration.models import Patterns, find_sites, model_device
from scout_core.integration.restore_state import TrainingState

AXIS_OF_MESH_DIM = {
    "d": ("d", "dp", "ddp", "data", "dp_replicate", "replicate", "data_parallel"),
    "s": ("s", "fsdp", "shard", "dp_shard"),
    "t": ("t", "tp", "tensor", "tensor_parallel"),
    "p": ("p", "pp", "pipeline", "pipeline_parallel"),
    "c": ("c", "cp", "context", "context_parallel"),
    "e": ("e", "ep", "expert", "expert_parallel"),
}
"""Mesh dimension names that are understood, by axis."""


class PyTorch(ShardedByFSDP2):
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
        super().__init__([model])
        self._optimizer = optimizer
        self._mesh = root_mesh(mesh if mesh is not None else find_mesh(model))
        self.device = model_device(model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        patterns = patterns or Patterns()
        if self._mesh is not None and has_stages(self._mesh):
            patterns = replace(patterns, stage=True)
        sites, self._missing = find_sites(inner, patterns)
        experts = find_experts(inner, patterns.experts) if patterns.experts is not None else []
        self._has_experts = bool(experts)
        self._sites = with_experts(sites, experts)

    def topology(self) -> Topology:
        """Addresses from the mesh; without one all ranks are data replicas."""
        if self._mesh is None:
            return Topology.from_coordinates([(rank,) for rank in range(dist.get_world_size())])
        places = addresses(self._mesh, self.shards_data)
        if not self._has_experts:
            return Topology.from_coordinates(places)
        return Topology.from_coordinates(as_data_ranks(places), places)

    def sites(self) -> Sequence[Site]:
        return self._sites

    def uncovered(self) -> Sequence[str]:
        return self._missing

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._optimizer]

    def state_units(self) -> Sequence[StateUnit]:
        return state_units(self._models, self._sites, [self._optimizer])

    def training_state(self) -> TrainingState:
        return TrainingState(self._models[0], self._optimizer)

    def on_step_end(self, hook: Callable[[], None]) -> Undo:
        return after_each_step(self._optimizer, hook)


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


def has_stages(mesh: DeviceMesh) -> bool:
    """Tell whether the mesh has a pipeline dimension of more than one stage."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    return any(sizes.get(name, 1) > 1 for name in AXIS_OF_MESH_DIM["p"])


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
