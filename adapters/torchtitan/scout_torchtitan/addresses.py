"""Addresses of all ranks from torchtitan's parallel degrees, without communication.

torchtitan lays the ranks out row-major, twice:

    dense : (pp, dp_replicate, dp_shard, cp, tp)   -> p, d, s, c, t
    expert: (pp, dp_replicate, efsdp, ep, etp)     -> p, d, s, e, t

Expert groups are carved out of dp_shard, cp and tp, so e does not constrain dense peers. The
context axis is inside of the FSDP mesh: its all-gather spans s and c, its attention work does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scout_core.decision.topology import Coordinate, Topology
from scout_core.errors import ScoutError

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims


def topology_of(dims: ParallelDims) -> Topology:
    """Return the addresses of a job.

    Raises:
        ScoutError: the degrees do not multiply to the world size.
    """
    dense = _grid("pdsct", (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp), dims)
    if dims.ep == 1:
        return Topology.from_coordinates(dense)
    sharded = dims.dp_shard * dims.cp * dims.tp
    efsdp = sharded // (dims.ep * dims.etp)
    expert = _grid("pdset", (dims.pp, dims.dp_replicate, efsdp, dims.ep, dims.etp), dims)
    return Topology.from_coordinates(dense, expert)


def _grid(axes: str, degrees: Sequence[int], dims: ParallelDims) -> list[Coordinate]:
    if math.prod(degrees) != dims.world_size:
        raise ScoutError(
            f"parallel degrees {dict(zip(axes, degrees, strict=True))} give "
            f"{math.prod(degrees)} ranks, the job has {dims.world_size}; SCOUT cannot tell which "
            "ranks do the same work: choose degrees that fill the job, or set scout.enable = false"
        )
    return [
        Coordinate(**dict(zip(axes, _index(rank, degrees), strict=True)))
        for rank in range(dims.world_size)
    ]


def _index(rank: int, degrees: Sequence[int]) -> list[int]:
    index = []
    for degree in reversed(degrees):
        rank, position = divmod(rank, degree)
        index.append(position)
    return index[::-1]


def check_against_meshes(dims: ParallelDims, topology: Topology, rank: int) -> None:
    """Compare this rank's addresses with its place in each device mesh that torchtitan built.

    Raises:
        ScoutError: a mesh puts this rank elsewhere: another layout than SCOUT knows.
    """
    dense, expert = topology.dense[rank], topology.expert[rank]
    expected = {
        "pp": dense.p,
        "dp_replicate": dense.d,
        "batch": dense.d * dims.dp_shard + dense.s,
        "fsdp": dense.s * dims.cp + dense.c,
        "cp": dense.c,
        "tp": dense.t,
    }
    if dims.ep > 1:
        expected |= {"efsdp": expert.s, "ep": expert.e, "etp": expert.t}
    for name, place in expected.items():
        mesh = dims.get_optional_mesh(name)
        found = 0 if mesh is None else mesh.get_local_rank()
        if found != place:
            raise ScoutError(
                f"rank {rank} is number {found} in torchtitan's mesh {name!r}, but SCOUT's "
                f"address {dense} (experts: {expert}) says {place}; this torchtitan lays ranks "
                "out in another way: set scout.enable = false and report the parallel degrees"
            )
