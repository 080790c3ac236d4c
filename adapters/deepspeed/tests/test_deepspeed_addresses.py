"""Addresses from what each rank knows of its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from scout_deepspeed.addresses import Place, topology_of

from scout_core.decision.topology import Coordinate
from scout_core.errors import ScoutError

degrees = st.integers(1, 4)


def places(
    d: int, t: int = 1, p: int = 1, c: int = 1, shards: int = 1, joined: bool = False
) -> list[Place]:
    """Ranks laid out as (p, d, c, t), t innermost.

    Args:
        shards: consecutive replicas that hold one copy of the parameters together.
        joined: ZeRO reduces over c as well as over d.
    """
    result = []
    for rank in range(d * t * p * c):
        rest, tensor = divmod(rank, t)
        rest, context = divmod(rest, c)
        stage, replica = divmod(rest, d)
        data = [
            ((stage * d + other) * c + part) * t + tensor
            for other in range(d)
            for part in (range(c) if joined else [context])
        ]
        first = replica // shards * shards
        holders = range(first, first + shards)
        copy = [((stage * d + h) * c + context) * t + tensor for h in holders]
        result.append(Place(tensor, stage, context, tuple(data), tuple(copy)))
    return result


@given(degrees, degrees, degrees, degrees, st.booleans())
def test_below_stage_3_all_ranks_of_equal_work_are_replicas(
    d: int, t: int, p: int, c: int, joined: bool
) -> None:
    topology = topology_of(places(d, t, p, c, joined=joined))
    for rank in range(d * t * p * c):
        group = topology.peer_group(rank).ranks
        assert len(group) == d
        assert {place.work for r, place in enumerate(topology.dense) if r in group} == {
            topology.dense[rank].work
        }


@given(degrees, degrees, degrees)
def test_zero_3_has_no_replicas_and_its_shards_are_peers(d: int, t: int, c: int) -> None:
    topology = topology_of(places(d, t, 1, c, shards=d))
    assert all(place.d == 0 for place in topology.dense)
    assert all(len(topology.peer_group(r).ranks) == d for r in range(topology.world_size))


def test_hpz_of_6_ranks_in_pairs_has_3_replicas_of_2_shards() -> None:
    topology = topology_of(places(6, shards=2))
    assert topology.dense[3] == Coordinate(d=1, s=1)
    assert topology.peer_group(0).ranks == (0, 2, 4)
    assert topology.peer_group(1).ranks == (1, 3, 5)


def with_experts(world: int, sizes: list[int], shards_experts: bool = False) -> list[Place]:
    everyone = tuple(range(world))
    return [
        Place(
            0,
            0,
            0,
            everyone,
            everyone if shards_experts else (rank,),
            {f"ep_size_{n}": (rank % n, tuple(range(rank % n, world, n))) for n in sizes},
            shards_experts,
        )
        for rank in range(world)
    ]


def test_experts_have_a_layout_of_their_own_and_dense_layers_all_ranks() -> None:
    topology = topology_of(with_experts(8, [2]))
    assert topology.peer_group(5).ranks == tuple(range(8))
    assert topology.peer_group(5, "expert").ranks == (1, 3, 5, 7)
    assert topology.expert[5] == Coordinate(d=2, e=1)


def test_sharded_experts_are_shard_peers() -> None:
    topology = topology_of(with_experts(8, [2], shards_experts=True))
    assert topology.peer_group(5, "expert").kind == "shard"
    assert topology.peer_group(5, "expert").ranks == (1, 3, 5, 7)


def test_nested_expert_groups_are_addressed_by_the_largest() -> None:
    assert topology_of(with_experts(8, [2, 4])).peer_group(1, "expert").ranks == (1, 5)


def test_expert_groups_that_are_not_nested_are_refused() -> None:
    with pytest.raises(ScoutError, match=r"ep_size_2 and with .* in ep_size_3"):
        topology_of(with_experts(6, [2, 3]))


def test_a_place_survives_the_wire() -> None:
    for place in with_experts(4, [2]):
        assert Place.from_wire(place.to_wire()) == place
