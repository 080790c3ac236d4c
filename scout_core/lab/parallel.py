"""Parallelise the drill's model the way a user would: DDP, FSDP2, HSDP, HSDP x TP, experts."""

from __future__ import annotations

import enum

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from scout_core.decision.topology import Coordinate, Topology
from scout_core.errors import ScoutError
from scout_core.integration.expert_sites import as_data_ranks
from scout_core.lab import moe
from scout_core.lab.model import GPT
from scout_core.lab.pipeline import STAGES, Stage

EXPERT_RANKS = 2  # expert-parallel positions of the layout "moe"


class Parallelism(enum.StrEnum):
    """What `scout drill --parallelism` accepts."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    HSDP = "hsdp"  # replicas x shards
    HSDP_TP = "hsdp_tp"  # replicas x shards x 2 tensor-parallel positions
    PP_FSDP = "pp_fsdp"  # 2 pipeline stages x shards
    MOE = "moe"  # shards; experts on 2 expert-parallel positions x their replicas


TP_PLAN: dict[str, ParallelStyle] = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def degrees(parallelism: Parallelism, ranks: int) -> dict[str, int]:
    """Return the degree of each axis.

    Raises:
        ScoutError: the number of ranks does not factor.
    """
    if ranks < 1:
        raise ScoutError(f"--ranks {ranks} must be >= 1")
    if parallelism is Parallelism.DDP:
        return {"d": ranks}
    if parallelism is Parallelism.FSDP2:
        return {"s": ranks}
    if parallelism is Parallelism.MOE:
        return {"s": _part(parallelism, ranks, EXPERT_RANKS), "e": EXPERT_RANKS}
    if parallelism is Parallelism.PP_FSDP:
        return {"p": STAGES, "s": _part(parallelism, ranks, STAGES)}
    tensor = 2 if parallelism is Parallelism.HSDP_TP else 1
    return {"d": _part(parallelism, ranks, 2 * tensor), "s": 2, "t": tensor}


def _part(parallelism: Parallelism, ranks: int, unit: int) -> int:
    parts, rest = divmod(ranks, unit)
    if rest:
        raise ScoutError(
            f"--ranks {ranks} cannot be laid out as {parallelism.value}: it needs a multiple of "
            f"{unit}; use {unit * 2} or 8"
        )
    return parts


def topology(parallelism: Parallelism, ranks: int, ranks_per_host: int | None = None) -> Topology:
    """Addresses of the drill's job.

    Raises:
        ScoutError: the ranks do not factor, or the hosts do not divide them.
    """
    sizes = degrees(parallelism, ranks)
    if parallelism is Parallelism.MOE:
        places = [
            Coordinate(s=rank // EXPERT_RANKS, e=rank % EXPERT_RANKS) for rank in range(ranks)
        ]
        hosts = None if ranks_per_host is None else host_names(ranks, ranks_per_host)
        return Topology.from_coordinates(as_data_ranks(places), places, hosts)
    return Topology.from_degrees(order="pdstce", hosts=ranks_per_host, **sizes)


def parallelise(
    model: GPT,
    parallelism: Parallelism,
    ranks: int,
    device: str = "cpu",
    fixed_buckets: bool = False,
) -> tuple[nn.Module, DeviceMesh | None]:
    """Wrap the model; a collective call. Returns the wrapped model and its mesh.

    Args:
        fixed_buckets: keep DDP from re-ordering its gradient buckets after the first step, so that
            a restarted run is bitwise equal to one that was not interrupted.
    """
    sizes = degrees(parallelism, ranks)
    if parallelism is Parallelism.DDP:
        return DistributedDataParallel(model, find_unused_parameters=fixed_buckets), None
    if parallelism is Parallelism.MOE:
        shape = (sizes["s"], sizes["e"])
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp_shard", "ep"))
        moe.shard(model, mesh)
        return model, mesh
    names = {"p": "pp", "d": "dp_replicate", "s": "dp_shard", "t": "tp"}
    axes = [axis for axis in "pdst" if axis in sizes]
    if parallelism is not Parallelism.HSDP_TP:
        axes = [axis for axis in axes if axis != "t"]
    mesh = init_device_mesh(
        device,
        tuple(sizes[axis] for axis in axes),
        mesh_dim_names=tuple(names[axis] for axis in axes),
    )
    trained: GPT | Stage = model
    if "p" in axes:
        trained = Stage(model, mesh["pp"].get_local_rank())
    if "t" in axes:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], TP_PLAN)
    data = mesh["dp_replicate", "dp_shard"] if "d" in axes else mesh["dp_shard"]
    for layer in trained.layers:
        fully_shard(layer, mesh=data)
    fully_shard(trained, mesh=data)
    if isinstance(trained, Stage):
        trained.connect(mesh)
    return trained, mesh


def host_names(ranks: int, ranks_per_host: int) -> tuple[str, ...]:
    """Labels of simulated hosts, by rank."""
    return tuple(f"host-{rank // ranks_per_host}" for rank in range(ranks))


def plain_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Local parts of all parameters, copied, for comparing two runs bit by bit."""
    from scout_core.evidence.capture import local_of

    return [local_of(parameter.detach()).clone() for parameter in model.parameters()]
