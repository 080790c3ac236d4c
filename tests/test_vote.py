"""The readiness vote: all enter or nobody does; odd ranks are named as not comparable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.vote import Ballot, Vote, count, source_of
from scout_core.errors import ScoutError

READY = Vote(4, "hidden:Block", site="layers.1", skeleton="(T)", modes="m", constants=(1, None))
LEAF = ("float32", (2, 8), True, ())


def votes(size: int, **odd: Vote) -> dict[int, Vote]:
    cast = {rank: replace(READY, leaves=(LEAF,)) for rank in range(size)}
    return {**cast, **{int(name[1:]): vote for name, vote in odd.items()}}


def test_equal_votes_enter() -> None:
    ballot = count(votes(4))
    assert ballot.enter
    assert ballot == Ballot(True)


def test_a_stage_without_the_module_sits_the_check_out() -> None:
    assert count({rank: Vote(1, "head", has_site=False) for rank in range(3)}).enter


@given(st.integers(3, 9), st.data())
def test_a_minority_that_did_not_call_the_module_is_named(size: int, data: st.DataObject) -> None:
    late = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=(size - 1) // 2))
    skipped = replace(READY, ready=False, why_not="layers.1 was not called")
    ballot = count({r: skipped if r in late else READY for r in range(size)})
    assert not ballot.enter
    assert ballot.dissent is not None
    assert ballot.dissent.reason == "WORK_SKIPPED"
    assert ballot.dissent.ranks == tuple(sorted(late))


def test_half_the_ranks_without_a_call_name_nobody() -> None:
    skipped = replace(READY, ready=False, why_not="x")
    ballot = count(votes(4, r0=skipped, r3=skipped))
    assert ballot.dissent is not None
    assert ballot.dissent.ranks == ()


def test_nobody_having_a_call_is_an_absence_not_a_fault() -> None:
    ballot = count({r: replace(READY, ready=False, why_not="compiled") for r in range(3)})
    assert ballot.absent == "compiled"
    assert ballot.dissent is None


def test_a_peer_with_other_kernels_or_rows_is_not_comparable_and_named() -> None:
    ready = {r: replace(READY, leaves=(LEAF,), rows=(8, 8), schedule="8 rows") for r in range(4)}
    assert count(ready).enter
    odd = replace(ready[2], schedule="8 rows by another library")
    ballot = count({**ready, 2: odd})
    assert not ballot.enter
    assert ballot.dissent is not None
    assert (ballot.dissent.reason, ballot.dissent.ranks) == ("WORK_DIFFERS", (2,))


def test_experts_route_other_rows_on_every_rank_without_a_remark() -> None:
    routed = {
        r: replace(READY, leaves=(("float32", (r, 8), True, ()),), rows=(r, 1)) for r in range(3)
    }
    ballot = count(routed)
    assert (ballot.enter, ballot.remark) == (True, "")


def test_a_vote_with_rows_survives_the_wire() -> None:
    vote = replace(READY, leaves=(LEAF,), rows=(3, 4), schedule="s")
    assert Vote.from_wire(vote.to_wire()) == vote


def test_an_argument_of_unknown_type_retires_the_recipe() -> None:
    odd = replace(READY, ready=False, why_not="type Opaque", fixable=False)
    assert count(votes(3, r1=odd)).retire == "type Opaque"


@pytest.mark.parametrize(
    "change",
    [
        {"skeleton": "(TT)"},
        {"modes": "eval"},
        {"site": "layers.2"},
        {"leaves": (("float64", (2, 8), True, ()),)},
        {"leaves": (("float32", (2, 8, 1), True, ()),)},
        {"has_site": False},
    ],
)
def test_other_work_on_one_rank_is_named_and_never_entered(change: dict[str, object]) -> None:
    ballot = count(votes(5, r3=replace(READY, **{"leaves": (LEAF,), **change})))
    assert not ballot.enter
    assert ballot.dissent is not None
    assert ballot.dissent.ranks == (3,)


def test_other_shapes_of_the_same_kind_enter_with_a_remark() -> None:
    other = replace(READY, leaves=(("float32", (2, 9), True, ()),))
    ballot = count(votes(3, r2=other))
    assert ballot.enter
    assert "shapes differ" in ballot.remark


def test_a_broken_rank_switches_everybody_off() -> None:
    assert "rank 2: boom" in count(votes(4, r2=replace(READY, broken="boom"))).broken


def test_ranks_at_other_steps_switch_everybody_off() -> None:
    assert "disagree" in count(votes(4, r2=replace(READY, step=5))).broken


def test_a_vote_survives_the_wire() -> None:
    vote = replace(
        READY, leaves=(LEAF, ("int64", (), False, (4, 4))), constants=(1, 0.5, "a", None)
    )
    assert Vote.from_wire(vote.to_wire()) == vote


def test_a_vote_of_another_version_is_refused() -> None:
    with pytest.raises(ScoutError, match="same SCOUT"):
        Vote.from_wire(b'{"step": 1}')


@given(st.integers(1, 8), st.integers(0, 100))
def test_the_source_rotates_over_all_peers_at_the_same_position_of_each_group(
    size: int, round_: int
) -> None:
    groups = [tuple(range(start, start + 2 * size, 2)) for start in (0, 1)]
    positions = {group.index(source_of(group, round_)) for group in groups}
    assert positions == {round_ % size}
