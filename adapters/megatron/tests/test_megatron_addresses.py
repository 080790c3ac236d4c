"""Addresses: the same groups as Megatron's own arithmetic, whatever the degrees and the order."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scout_core.decision.topology import Coordinate
from scout_core.errors import ScoutError

pytest.importorskip("megatron.core.utils", reason="megatron-core is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.parallel_state import RankGenerator
    from scout_megatron.addresses import Place, topology_of

ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
degree = st.integers(1, 3)


def places_in(generator: RankGenerator, world: int, **tokens: str) -> list[Coordinate]:
    """Coordinates of all ranks by Megatron's arithmetic; axis -> its token."""
    fields: list[dict[str, int]] = [{} for _ in range(world)]
    for axis, token in tokens.items():
        for group in generator.get_ranks(token):
            for position, rank in enumerate(group):
                fields[rank][axis] = position
    return [Coordinate(**each) for each in fields]


def job(
    tp: int, cp: int, pp: int, dp: int, ep: int, etp: int, order: str
) -> tuple[RankGenerator, RankGenerator, list[Place]]:
    world = tp * cp * pp * dp
    expert_dp = world // (ep * etp * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order)
    mine = places_in(dense, world, t="tp", c="cp", p="pp", d="dp")
    theirs = places_in(expert, world, t="tp", e="ep", p="pp", d="dp")
    places = [Place(d, e._replace(p=d.p)) for d, e in zip(mine, theirs, strict=True)]
    return dense, expert, places


@settings(deadline=None)
@given(degree, degree, degree, degree, degree, degree, st.sampled_from(ORDERS))
def test_peers_are_the_members_of_megatrons_data_parallel_groups(
    tp: int, cp: int, pp: int, dp: int, ep: int, etp: int, order: str
) -> None:
    assume((tp * cp * dp) % (ep * etp) == 0)
    dense, expert, places = job(tp, cp, pp, dp, ep, etp, order)
    assume(dense.get_ranks("pp") == expert.get_ranks("pp"))  # Megatron refuses the others
    topology = topology_of([Place.from_wire(place.to_wire()) for place in places])
    replicas = {topology.replicas(rank) for rank in range(topology.world_size)}
    experts = {topology.replicas(rank, "expert") for rank in range(topology.world_size)}
    assert replicas == {tuple(sorted(group)) for group in dense.get_ranks("dp")}
    assert experts == {tuple(sorted(group)) for group in expert.get_ranks("dp")}


def test_four_replicas_of_two_tensor_parallel_ranks_are_the_papers_groups() -> None:
    _, _, places = job(2, 1, 1, 4, 1, 2, ORDERS[0])
    groups = [group.ranks for group in topology_of(places).peer_groups()]
    assert groups == [(0, 2, 4, 6), (1, 3, 5, 7)]


@settings(deadline=None)
@given(st.integers(2, 4), st.integers(0, 100))
def test_places_that_do_not_fill_a_grid_are_refused(dp: int, which: int) -> None:
    _, _, places = job(2, 1, 1, dp, 1, 2, ORDERS[0])
    del places[which % len(places)]
    with pytest.raises(ScoutError, match="cannot tell which ranks do the same work"):
        topology_of(places)
