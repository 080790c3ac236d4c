"""Addresses from torchtitan's degrees, against a mesh built the way torchtitan builds it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scout_torchtitan.addresses import check_against_meshes, topology_of

from scout_core.errors import ScoutError

DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT = ("pp", "dp_replicate", "efsdp", "ep", "etp")


@dataclass
class Mesh:
    place: int

    def get_local_rank(self) -> int:
        return self.place


@dataclass
class Dims:
    """Degrees of a job, and the device meshes of one of its ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    rank: int = 0
    wrong_mesh: str = ""

    @property
    def efsdp(self) -> int:
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes(DENSE))

    def sizes(self, names: tuple[str, ...]) -> list[int]:
        return [getattr(self, name) for name in names]

    def get_optional_mesh(self, name: str) -> Mesh | None:
        places = dict(zip(DENSE, np.unravel_index(self.rank, self.sizes(DENSE)), strict=True))
        places |= dict(zip(EXPERT, np.unravel_index(self.rank, self.sizes(EXPERT)), strict=True))
        places["batch"] = places["dp_replicate"] * self.dp_shard + places["dp_shard"]
        places["fsdp"] = places["dp_shard"] * self.cp + places["cp"]
        size = {"batch": self.dp_replicate * self.dp_shard, "fsdp": self.dp_shard * self.cp}
        if size.get(name, getattr(self, name, 1)) == 1:
            return None
        return Mesh(int(places[name]) + (name == self.wrong_mesh))


degrees = st.builds(
    Dims,
    *[st.integers(1, 3) for _ in DENSE],
    ep=st.integers(1, 4),
    etp=st.integers(1, 2),
    rank=st.integers(0, 10**6),
)


@given(degrees)
def test_addresses_agree_with_every_mesh_of_torchtitan(dims: Dims) -> None:
    dims.etp = dims.tp if dims.etp == 2 else 1  # what torchtitan allows
    assume((dims.dp_shard * dims.cp * dims.tp) % (dims.ep * dims.etp) == 0)
    dims.rank %= dims.world_size
    found = topology_of(dims)  # type: ignore[arg-type]
    assert found.world_size == dims.world_size
    check_against_meshes(dims, found, dims.rank)  # type: ignore[arg-type]


@given(degrees, st.sampled_from(["pp", "dp_replicate", "batch", "fsdp", "cp", "tp"]))
def test_a_mesh_that_places_a_rank_elsewhere_is_refused(dims: Dims, wrong: str) -> None:
    dims.ep = dims.etp = 1
    dims.rank %= dims.world_size
    assume(dims.get_optional_mesh(wrong) is not None)
    dims.wrong_mesh = wrong
    with pytest.raises(ScoutError, match=rf"mesh '{wrong}'.*scout.enable = false"):
        check_against_meshes(dims, topology_of(dims), dims.rank)  # type: ignore[arg-type]


def test_degrees_that_do_not_fill_the_job_are_refused() -> None:
    class Odd(Dims):
        world_size = 5  # type: ignore[assignment]

    with pytest.raises(ScoutError, match="give 4 ranks, the job has 5"):
        topology_of(Odd(dp_shard=4))  # type: ignore[arg-type]


def test_experts_do_not_divide_the_peers_of_dense_work() -> None:
    topology = topology_of(Dims(dp_shard=4, ep=2))  # type: ignore[arg-type]
    assert topology.peer_group(0).ranks == (0, 1, 2, 3)
    assert topology.peer_group(0, "expert").ranks == (0, 2)


def test_context_parallel_ranks_share_an_all_gather_and_are_no_peers() -> None:
    topology = topology_of(Dims(dp_shard=3, cp=2))  # type: ignore[arg-type]
    assert topology.peer_group(1).ranks == (1, 3, 5)
