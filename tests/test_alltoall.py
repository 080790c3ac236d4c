"""All-to-all replays are equal on all members, balanced, bounded, and checked to the element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.alltoall import (
    Exchange,
    balanced,
    cyclic,
    exchange_of_turn,
    refusal,
)
from scout_core.errors import ScoutError

sizes = st.integers(1, 12)
payloads = st.integers(1, 60)


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    size, payload = draw(sizes), draw(payloads)
    if size > 1 and draw(st.booleans()):
        return cyclic(size, payload, draw(st.integers(1, size - 1)))
    return balanced(size, payload)


def carry_out(exchange: Exchange) -> list[np.ndarray]:
    """Deliver what every member sends, as an all-to-all does."""
    members = range(len(exchange.matrix))
    sent = [
        np.split(exchange.send_payload(i), np.cumsum(exchange.send_splits(i))[:-1]) for i in members
    ]
    return [np.concatenate([sent[i][j] for i in members]) for j in members]


@given(exchanges())
def test_every_row_and_column_sums_to_the_payload(exchange: Exchange) -> None:
    matrix = np.array(exchange.matrix)
    assert set(matrix.sum(axis=0)) | set(matrix.sum(axis=1)) == {exchange.payload}


@given(exchanges())
def test_a_sound_all_to_all_passes_on_every_member(exchange: Exchange) -> None:
    for member, received in enumerate(carry_out(exchange)):
        assert exchange.check(member, received) == ()
        assert len(received) == sum(exchange.receive_splits(member)) == exchange.payload


@given(exchanges(), st.data())
def test_one_wrong_element_names_sender_receiver_and_place(
    exchange: Exchange, data: st.DataObject
) -> None:
    member = data.draw(st.integers(0, len(exchange.matrix) - 1))
    place = data.draw(st.integers(0, exchange.payload - 1))
    received = carry_out(exchange)[member]
    received[place] ^= 1 << data.draw(st.integers(0, 62))
    splits = exchange.receive_splits(member)
    sender = int(np.searchsorted(np.cumsum(splits), place, side="right"))
    inside = place - sum(splits[:sender])
    assert exchange.check(member, received) == ((sender, member, 1, inside),)


@given(st.integers(2, 12), payloads)
def test_members_that_swap_their_parts_are_seen(size: int, payload: int) -> None:
    exchange = balanced(size, payload * size)
    received = carry_out(exchange)
    assert exchange.check(0, received[1])


@given(sizes, payloads)
def test_the_balanced_matrix_is_as_even_as_it_can_be(size: int, payload: int) -> None:
    entries = [entry for row in balanced(size, payload).matrix for entry in row]
    assert max(entries) - min(entries) <= 1


@given(st.integers(2, 12), payloads)
def test_a_cycle_uses_every_ordered_pair_alone(size: int, payload: int) -> None:
    shifts = [exchange_of_turn(size, turn, 8 * payload, 1 << 20) for turn in range(1, size)]
    alone = [
        (i, j)
        for exchange in shifts
        for i, row in enumerate(exchange.matrix)
        for j, entry in enumerate(row)
        if entry == payload
    ]
    assert sorted(alone) == [(i, j) for i in range(size) for j in range(size) if i != j]


@given(sizes, st.integers(0, 40), st.integers(1, 10**6), st.integers(1, 4096))
def test_a_replay_sends_no_more_than_the_bound(size: int, turn: int, seen: int, bound: int) -> None:
    exchange = exchange_of_turn(size, turn, seen, bound)
    assert 8 * exchange.payload <= max(min(seen, bound), 8)
    assert exchange == exchange_of_turn(size, turn + size, seen, bound)


def test_a_matrix_that_depends_on_the_rank_is_refused_before_anybody_enters() -> None:
    plans = {rank: balanced(4, 8 if rank == 2 else 12) for rank in range(4)}
    said = refusal({rank: plan.digest for rank, plan in plans.items()})
    assert said.startswith("the all-to-all matrix depends on the rank")
    assert "ranks [0, 1, 3] have" in said
    assert "ranks [2] have" in said
    assert refusal({rank: balanced(4, 12).digest for rank in range(4)}) == ""


def test_the_digest_tells_patterns_and_shifts_apart() -> None:
    digests = {exchange_of_turn(5, turn, 400, 400).digest for turn in range(5)}
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (((1, 2), (1, 2)), "sums"),
        (((1, 2),), "square"),
        (((-1, 2), (2, -1)), ">= 0"),
        ((), "square"),
    ],
)
def test_an_uneven_matrix_is_refused(matrix: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ScoutError, match=message):
        Exchange("balanced", matrix)


@pytest.mark.parametrize("shift", [0, 4, -1])
def test_a_member_does_not_send_everything_to_itself(shift: int) -> None:
    with pytest.raises(ScoutError, match=r"must be in 1 \.\. 3"):
        cyclic(4, 8, shift)


def test_sizes_that_make_no_exchange_are_refused() -> None:
    for size, payload in ((0, 1), (4, 0), (4, 1 << 30)):
        with pytest.raises(ScoutError, match="must be in 1"):
            balanced(size, payload)
    with pytest.raises(ScoutError, match="bound_bytes=0"):
        exchange_of_turn(4, 0, 8, 0)


def test_the_output_of_another_exchange_is_not_compared() -> None:
    with pytest.raises(ScoutError, match="pass the output of this exchange"):
        balanced(2, 4).check(0, np.zeros(3, dtype=np.int64))
