"""Addresses, peer groups and coverage, against a literal reading of the definitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.topology import AXES, Coordinate, Topology
from scout_core.errors import ScoutError

grids = st.tuples(
    st.fixed_dictionaries({axis: st.sampled_from([1, 1, 1, 2, 3, 4]) for axis in AXES}).filter(
        lambda degrees: math.prod(degrees.values()) <= 96
    ),
    st.permutations(AXES).map("".join),
)


def addresses(degrees: dict[str, int], order: str) -> list[Coordinate]:
    """Every place of the grid, the last axis of the order varying fastest."""
    places = itertools.product(*(range(degrees[axis]) for axis in order))
    return [Coordinate(**dict(zip(order, place, strict=True))) for place in places]


def literal_peer_group(layout: list[Coordinate], rank: int) -> tuple[set[int], str]:
    """G_rep or G_shard of the specification, and the widening rule, as they are written."""
    r = layout[rank]
    everyone = range(len(layout))
    g_rep = {q for q in everyone if layout[q]._replace(d=0) == r._replace(d=0)}
    g_shard = {q for q in everyone if layout[q]._replace(d=0, s=0) == r._replace(d=0, s=0)}
    replicas = len({place.d for place in layout})
    shards = len({place.s for place in layout})
    if replicas == 1:
        return (g_shard, "shard") if shards > 1 else (g_rep, "none")
    if replicas < 3 and shards > 1:
        return g_shard, "widened"
    return g_rep, "replica"


@given(grids)
def test_peer_groups_are_the_definition_on_any_grid(grid: tuple[dict[str, int], str]) -> None:
    degrees, order = grid
    topology = Topology.from_degrees(order=order, **degrees)
    layout = addresses(degrees, order)
    assert list(topology.dense) == layout
    for rank in range(topology.world_size):
        found = topology.peer_group(rank)
        assert (set(found.ranks), found.kind) == literal_peer_group(layout, rank)
        assert list(found.ranks) == sorted(found.ranks)


@given(grids)
def test_every_rank_is_in_exactly_one_group_and_it_is_its_own(
    grid: tuple[dict[str, int], str],
) -> None:
    topology = Topology.from_degrees(order=grid[1], **grid[0])
    groups = topology.peer_groups()
    assert sorted(r for group in groups for r in group.ranks) == list(range(topology.world_size))
    assert all(topology.peer_group(r) == group for group in groups for r in group.ranks)


@given(grids, st.randoms())
def test_relabelled_ranks_keep_their_peers(grid: tuple[dict[str, int], str], random: Any) -> None:
    layout = list(Topology.from_degrees(order=grid[1], **grid[0]).dense)
    shuffled = list(layout)
    random.shuffle(shuffled)
    before, after = Topology.from_coordinates(layout), Topology.from_coordinates(shuffled)
    for rank, place in enumerate(shuffled):
        peers = {shuffled[q] for q in after.peer_group(rank).ranks}
        assert peers == {layout[q] for q in before.peer_group(layout.index(place)).ranks}


@given(grids)
def test_replicas_at_rest_differ_in_d_only(grid: tuple[dict[str, int], str]) -> None:
    topology = Topology.from_degrees(order=grid[1], **grid[0])
    for rank, place in enumerate(topology.dense):
        same = [q for q, other in enumerate(topology.dense) if other[1:] == place[1:]]
        assert list(topology.replicas(rank)) == same


@given(grids, st.sampled_from(AXES))
def test_axis_groups_differ_along_their_axis_only(
    grid: tuple[dict[str, int], str], axis: str
) -> None:
    topology = Topology.from_degrees(order=grid[1], **grid[0])
    groups = topology.axis_groups(axis)
    assert sorted(r for group in groups for r in group) == list(range(topology.world_size))
    for group in groups:
        places = [topology.dense[rank] for rank in group]
        assert len({place._replace(**{axis: 0}) for place in places}) == 1
        assert len(group) == grid[0][axis]


def test_the_papers_example_of_a_data_tensor_grid() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    assert topology.peer_group(0).ranks == (0, 2, 4, 6)
    assert topology.peer_group(1).ranks == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("degrees", "kind", "size", "can"),
    [
        ({"d": 1}, "none", 1, "none"),
        ({"t": 8}, "none", 1, "none"),
        ({"d": 2}, "replica", 2, "detect"),
        ({"s": 2}, "shard", 2, "detect"),
        ({"d": 3}, "replica", 3, "attribute"),
        ({"s": 4, "t": 2}, "shard", 4, "attribute"),
        ({"d": 2, "s": 2}, "widened", 4, "attribute"),
        ({"d": 3, "s": 2}, "replica", 3, "attribute"),
    ],
)
def test_three_peers_attribute_two_detect_one_compares_with_nothing(
    degrees: dict[str, int], kind: str, size: int, can: str
) -> None:
    topology = Topology.from_degrees(**degrees)
    group = topology.peer_group(topology.world_size - 1)
    assert (group.kind, len(group.ranks), group.can) == (kind, size, can)
    assert topology.coverage().worst == can


@given(grids)
def test_coverage_lists_each_group_once_with_its_reason(grid: tuple[dict[str, int], str]) -> None:
    topology = Topology.from_degrees(order=grid[1], **grid[0])
    found = topology.coverage()
    assert [row.ranks for row in found.groups] == [group.ranks for group in topology.peer_groups()]
    assert [row.ranks for row in found.state_groups] == list(topology.axis_groups("d"))
    assert all(row.why for row in (*found.groups, *found.state_groups))


def test_state_of_a_pure_fsdp_job_is_not_seen_and_the_reason_is_said() -> None:
    found = Topology.from_degrees(s=4).coverage()
    assert [row.can for row in found.groups] == ["attribute"]
    assert {row.can for row in found.state_groups} == {"none"}
    assert "only this rank" in found.state_groups[0].why


def test_experts_carved_out_of_data_ranks_have_groups_of_their_own() -> None:
    dense = [(d, 0, 0, 0, 0, 0) for d in range(8)]
    expert = [(rank // 2, 0, 0, 0, 0, rank % 2) for rank in range(8)]
    topology = Topology.from_coordinates(dense, expert)
    assert topology.layouts == ("dense", "expert")
    assert topology.peer_group(3).ranks == tuple(range(8))
    assert topology.peer_group(3, "expert").ranks == (1, 3, 5, 7)
    assert [row.layout for row in topology.coverage().groups] == ["dense", "expert", "expert"]


def test_hosts_are_numbered_or_named() -> None:
    assert Topology.from_degrees(d=4, hosts=2).hosts == ("host-0", "host-0", "host-1", "host-1")
    assert Topology.from_degrees(d=2, hosts=["a", "b"]).hosts == ("a", "b")


MISTAKES: list[tuple[Any, str]] = [
    (lambda: Topology.from_degrees(d=0), "d=0 must be an integer >= 1"),
    (lambda: Topology.from_degrees(d=-2), "d=-2 must be an integer >= 1"),
    (lambda: Topology.from_degrees(d=True), "d=True must be an integer >= 1"),
    (lambda: Topology.from_degrees(t="2"), "t='2' must be an integer >= 1"),  # type: ignore[arg-type]
    (lambda: Topology.from_degrees(x=2), "x=2: there is no axis 'x'"),
    (lambda: Topology.from_degrees(dp=2), "dp=2: there is no axis 'dp'"),
    (lambda: Topology.from_degrees(d=2, order="dd"), "order='dd' must name each axis"),
    (lambda: Topology.from_degrees(d=2, order="dz"), "order='dz' must name each axis"),
    (lambda: Topology.from_degrees(d=2, t=2, order="d"), "order='d' leaves out t"),
    (lambda: Topology.from_degrees(d=4, hosts=3), "hosts=3 ranks per host does not divide the 4"),
    (lambda: Topology.from_degrees(d=4, hosts=0), "hosts=0 ranks per host"),
    (lambda: Topology.from_degrees(d=4, hosts=["a"]), "4 dense addresses, .* 1 hosts"),
    (lambda: Topology.from_coordinates([]), "dense layout has no rank"),
    (lambda: Topology.from_coordinates([(0,), (0,)]), "ranks 0 and 1 share the dense address"),
    (lambda: Topology.from_coordinates([(0,), (1,)], [(0,)]), "2 dense addresses, 1 expert"),
    (lambda: Topology.from_coordinates([(0,) * 7]), "address .* of rank 0 must be up to 6"),
    (lambda: Topology.from_coordinates([(0.5,)]), "address .* of rank 0 must be"),  # type: ignore[list-item]
    (lambda: Topology.from_coordinates([(-1,)]), "address .* of rank 0 must be"),
    (lambda: Topology.from_degrees(d=2).peer_group(2), "rank 2 is not in a world of 2"),
    (lambda: Topology.from_degrees(d=2).peer_group(-1), "rank -1 is not in a world of 2"),
    (lambda: Topology.from_degrees(d=2).peer_group(0, "moe"), "layout 'moe' does not exist"),  # type: ignore[arg-type]
    (lambda: Topology.from_degrees(d=2).replicas(9), "rank 9 is not in a world of 2"),
    (lambda: Topology.from_degrees(d=2).axis_groups("dp"), "axis 'dp' does not exist"),
    (lambda: Topology.from_degrees(d=2).axis_groups(""), "axis '' does not exist"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_is_one_clear_error(mistake: Any, message: str) -> None:
    with pytest.raises(ScoutError, match=message) as caught:
        mistake()
    assert "\n" not in str(caught.value)
