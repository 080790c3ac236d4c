"""All-to-all replays: sizes are agreed, damage is placed, odd matrices are not entered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.alltoall_verdict import Exchanged, Pair, culprit_of, to_incidents
from scout_core.decision.consensus import Status
from scout_core.decision.topology import Topology
from scout_core.evidence.clock import CpuClock
from scout_core.evidence.exchange import LocalExchange, Ranks, run_threads
from scout_core.integration.alltoall_replay import AllToAllReplay, AllToAllWatch, Seen

CPU = torch.device("cpu")
sizes = st.integers(3, 7)


@given(sizes, st.data())
def test_a_sender_that_damages_several_receivers_is_named(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    others = [rank for rank in range(size) if rank != bad]
    hit = data.draw(st.sets(st.sampled_from(others), min_size=2))
    assert culprit_of({(bad, rank) for rank in hit}) == bad
    assert culprit_of({(rank, bad) for rank in hit}) == bad


@given(sizes, st.data())
def test_one_damaged_pair_names_nobody(size: int, data: st.DataObject) -> None:
    sender, receiver = data.draw(st.permutations(range(size)))[:2]
    assert culprit_of({(sender, receiver)}) is None
    assert culprit_of({(sender, receiver), (receiver, sender)}) is None


def test_damage_without_a_common_rank_names_nobody() -> None:
    assert culprit_of({(0, 1), (2, 3)}) is None
    assert culprit_of(()) is None


def test_what_a_rank_sends_itself_never_left_it() -> None:
    assert culprit_of({(2, 2)}) == 2


@pytest.mark.parametrize(
    ("reproduced", "status"), [(3, Status.ATTRIBUTED), (0, Status.INCONCLUSIVE)]
)
def test_damage_that_does_not_come_again_names_nobody(reproduced: int, status: Status) -> None:
    found = Exchanged((0, 1, 2), frozenset({(1, 0), (1, 2)}), 3, reproduced)
    (incident,) = to_incidents([found], Topology.from_degrees(d=3), {1: "cuda:1"}, 7)
    assert (incident.reason, incident.status) == ("SDC_ALLTOALL", status)
    assert incident.culprit_ranks == ((1,) if reproduced else ())
    assert "1 -> 0" in incident.message


class Damaging(LocalExchange):
    """Flips an element of what arrives, where told to."""

    def __init__(self, inner: LocalExchange, damage: Callable[[Ranks, torch.Tensor], None]) -> None:
        self.__dict__.update(inner.__dict__)
        self._damage = damage

    def all_to_all(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        ranks: Ranks,
    ) -> None:
        super().all_to_all(sent, received, splits, ranks)
        self._damage(ranks, received)


def run(
    world: int,
    turns: int,
    bound: Callable[[int], int] = lambda rank: 1 << 10,
    damage: Callable[[int, torch.Tensor], None] = lambda rank, received: None,
) -> list[list[Seen]]:
    """Replay one group of all ranks; rank r has seen 100 * (r + 1) bytes."""
    ranks = tuple(range(world))

    def body(exchange: LocalExchange) -> list[Seen]:
        watch = AllToAllWatch()
        watch.sizes_bytes[ranks] = 100 * (exchange.rank + 1)
        own = Damaging(exchange, lambda _, received: damage(exchange.rank, received))
        replay = AllToAllReplay(own, CpuClock(), watch, bound(exchange.rank))
        found = []
        for _ in range(turns):
            replay.agree()
            found.append(replay.run(ranks, CPU, repeats=2))
        return found

    return run_threads(world, body)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_healthy_group_passes_every_matrix_of_a_cycle(world: int) -> None:
    for seen in run(world, turns=world):
        assert all(each.seconds is not None and each.seconds >= 0 for each in seen)
        assert all(each.damaged == () for each in seen)


def test_a_flipped_element_tells_the_pair_it_travelled_between() -> None:
    def damage(rank: int, received: torch.Tensor) -> None:
        if rank == 2:
            received[-1] ^= 1 << 5  # the last sender's part comes last

    seen = run(4, turns=4, damage=damage)
    pairs: set[Pair] = {pair for rank in seen for each in rank for pair in each.damaged}
    assert {receiver for _, receiver in pairs} == {2}
    assert all(not each.damaged for rank in (0, 1, 3) for each in seen[rank])


def test_matrices_that_depend_on_the_rank_are_refused_before_anybody_enters() -> None:
    entered: list[int] = []
    seen = run(
        3, 1, bound=lambda rank: 160 if rank == 1 else 80, damage=lambda r, _: entered.append(r)
    )
    for (each,) in seen:
        assert each.seconds is None
        assert "ranks [1]" in each.refused
    assert entered == []
