"""Where a wrong result began among ranks that exchange data inside a layer."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.origin import Event, Origins, Trace, departure
from scout_core.decision.replay_verdict import Finding
from scout_core.decision.topology import LayoutName, Topology

PLACES = ("wq in", "wq out", "wo out", "wo result", "ffn in", "out")
BROUGHT = {"wo result"}  # by a collective among partners


def peers_of(topology: Topology, rank: int, layout: LayoutName) -> tuple[int, ...]:
    return topology.peer_group(rank, layout).ranks


def traces_of(topology: Topology, faulty: int, begins: str) -> dict[int, Trace]:
    """Traces of a layer in which `faulty` goes wrong at a place; partners follow at "wo result"."""
    row = next(row for row in topology.rows if faulty in row)
    start, meet = PLACES.index(begins), PLACES.index("wo result")
    traces: dict[int, Trace] = {}
    for rank in range(topology.world_size):
        wrong_from = len(PLACES)
        if rank == faulty:
            wrong_from = start
        elif rank in row and start < meet:
            wrong_from = meet
        traces[rank] = tuple(
            Event(
                place, place not in BROUGHT, "dense", i if i < wrong_from else -1 - i - 100 * rank
            )
            for i, place in enumerate(PLACES)
        )
    return traces


def find(topology: Topology, traces: Mapping[int, Trace], *accused: int) -> Origins:
    return Origins.find(
        frozenset(accused),
        traces,
        topology.rows,
        lambda rank, layout: peers_of(topology, rank, layout),
    )


def outputs_of(*ranks: int) -> Finding:
    return Finding("SDC_REPLAY_OUTPUT", ranks, tuple(range(8)), "output")


@given(
    d=st.integers(3, 6),
    t=st.integers(2, 4),
    begins=st.sampled_from(["wq out", "wo out"]),
    seed=st.integers(0, 10**6),
)
def test_the_rank_that_computed_the_first_wrong_value_is_named_and_its_partners_are_not(
    d: int, t: int, begins: str, seed: int
) -> None:
    topology = Topology.from_degrees(d=d, t=t)
    faulty = random.Random(seed).randrange(d * t)
    row = next(row for row in topology.rows if faulty in row)
    origins = find(topology, traces_of(topology, faulty, begins), *row)
    named = [origins.settle(outputs_of(rank)) for rank in row]
    assert [f.ranks for f in named if f is not None] == [(faulty,)]
    assert begins in next(f.what for f in named if f is not None)


def test_a_fault_behind_the_last_exchange_stays_with_its_rank() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    origins = find(topology, traces_of(topology, 5, "out"), 5)
    assert origins.settle(outputs_of(5)) == Finding(
        "SDC_REPLAY_OUTPUT", (5,), tuple(range(8)), "output, first wrong at out"
    )


def test_a_rank_that_received_the_first_wrong_value_is_not_named() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    settled = find(topology, traces_of(topology, 5, "wo result"), 5).settle(outputs_of(5))
    assert settled is not None
    assert settled.ranks == ()
    assert "[4, 5]" in settled.why


def test_without_a_trace_one_outlier_of_a_row_is_named_and_two_are_not() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    nothing: dict[int, Trace] = dict.fromkeys(range(8), ())
    alone = find(topology, nothing, 5).settle(outputs_of(5))
    both = find(topology, nothing, 4, 5).settle(outputs_of(5))
    assert alone is not None
    assert both is not None
    assert (alone.ranks, both.ranks) == ((5,), ())


def test_two_partners_that_go_wrong_at_the_same_event_are_not_told_apart() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    traces = traces_of(topology, 5, "wq out") | {4: traces_of(topology, 4, "wq out")[4]}
    settled = find(topology, traces, 4, 5).settle(outputs_of(4))
    assert settled is not None
    assert settled.ranks == ()


def test_a_corrupt_weight_on_a_partner_clears_the_rank_that_was_only_reached_by_it() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    traces = traces_of(topology, 4, "wq out")
    origins = Origins.find(
        frozenset({5}),
        traces,
        topology.rows,
        lambda rank, layout: peers_of(topology, rank, layout),
        blamed=frozenset({4}),  # by the audit
    )
    assert origins.settle(outputs_of(5)) is None


def test_a_rank_that_made_only_its_partner_wrong_is_named_in_its_place() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    settled = find(topology, traces_of(topology, 4, "wq out"), 5).settle(outputs_of(5))
    assert settled is not None
    assert settled.ranks == (4,)
    assert "wq out" in settled.what


def test_findings_about_memory_are_left_alone() -> None:
    topology = Topology.from_degrees(d=4, t=2)
    at_rest = Finding("SDC_STATE", (5,), (1, 3, 5, 7), "layers.0")
    assert find(topology, traces_of(topology, 4, "wq out"), 5).settle(at_rest) == at_rest


def test_experts_own_values_are_compared_among_expert_peers() -> None:
    dense = [(rank, 0) for rank in range(6)]
    expert = [(rank // 2, 0, 0, 0, 0, rank % 2) for rank in range(6)]
    topology = Topology.from_coordinates(dense, expert)
    assert topology.rows == ((0, 1), (2, 3), (4, 5))
    traces = {
        rank: (
            Event("experts in", False, "expert", rank % 2),
            Event("experts out", True, "expert", 99 if rank == 2 else 10 + rank % 2),
            Event("experts result", False, "dense", 99 if rank in (2, 3) else 20),
        )
        for rank in range(6)
    }
    origins = find(topology, traces, 2, 3)
    assert origins.places == {2: "experts out"}


@given(st.integers(0, 7), st.integers(0, len(PLACES)))
def test_a_rank_with_other_events_than_its_peers_has_no_departure(rank: int, cut: int) -> None:
    topology = Topology.from_degrees(d=4, t=2)
    traces = traces_of(topology, rank, "wq out")
    other = (rank + 2) % 8
    traces[other] = traces[other][:cut]
    found = departure(rank, traces, lambda r, layout: peers_of(topology, r, layout))
    assert (found is not None) == (cut > PLACES.index("wq out"))
