"""The slowest of ranks that wait for each other is named only when it stands out from them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Culprit, Incident, Kind, name_ranks
from scout_core.decision.slow_partners import settle
from scout_core.decision.topology import Topology


def slow(*ranks: int) -> Incident:
    culprits = tuple(Culprit(rank) for rank in ranks)
    message = f"{name_ranks(culprits)} needs long"
    kind, status = Kind.STRAGGLER, Status.ATTRIBUTED
    return Incident(kind, "STRAGGLER_COMPUTE", status, message, culprits=culprits)


@given(st.integers(3, 6), st.integers(2, 4), st.floats(1.06, 9.0), st.integers(0, 10**6))
def test_partners_that_only_wait_are_not_named(d: int, t: int, factor: float, seed: int) -> None:
    draw = random.Random(seed)
    rows = Topology.from_degrees(d=d, t=t).rows
    row = draw.choice(rows)
    culprit = draw.choice(row)
    waiting = {rank: 1.0 + (factor - 1.0) * draw.uniform(-0.1, 0.4) for rank in row}
    factors = dict.fromkeys(range(d * t), 1.0) | waiting | {culprit: factor}
    found = settle([slow(rank) for rank in row], factors, rows)
    assert [incident.culprit_ranks for incident in found] == [(culprit,)]


def test_a_partner_that_is_accused_before_the_culprit_is_not_named_either() -> None:
    assert settle([slow(3)], {2: 4.1, 3: 2.0}, [(0, 1), (2, 3)]) == ()


def test_partners_that_are_equally_slow_are_one_row_and_nobody_is_named() -> None:
    (found,) = settle([slow(2), slow(3)], {2: 2.0, 3: 1.9}, [(0, 1), (2, 3)])
    assert (found.status, found.culprits) == (Status.INCONCLUSIVE, ())
    assert found.peer_group == (2, 3)


def test_a_rank_without_partners_is_named_as_before() -> None:
    incident = slow(1, 2)
    assert settle([incident], {1: 2.0, 2: 2.0}, [(0,), (1,), (2,)]) == (incident,)


def test_of_two_slow_ranks_of_one_group_the_one_that_waits_is_left_out() -> None:
    (found,) = settle([slow(0, 2)], {0: 3.0, 1: 1.0, 2: 1.5, 3: 5.0}, [(0, 1), (2, 3)])
    assert found.culprit_ranks == (0,)
    assert found.message == "rank 0 needs long"


def test_other_incidents_are_left_alone() -> None:
    corrupt = Incident(Kind.SDC, "SDC_STATE", Status.INCONCLUSIVE, "differs")
    assert settle([corrupt], {0: 9.0, 1: 9.0}, [(0, 1)]) == (corrupt,)
