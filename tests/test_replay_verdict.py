"""What gathered replay evidence means: each rank is blamed once, for its earliest difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision import replay_verdict
from scout_core.decision.evidence import Signature
from scout_core.decision.replay_verdict import (
    STAGES,
    Report,
    durations,
    judge_replay,
    judge_rest,
    judge_state,
)
from scout_core.errors import ScoutError

GOOD = {stage: Signature(i, "xxh3") for i, stage in enumerate(STAGES)}
BAD = Signature(99, "xxh3")


def reports(size: int, wrong: dict[int, dict[str, Signature]]) -> dict[int, Report]:
    return {
        r: Report({**GOOD, **wrong.get(r, {})}, state={"w": GOOD["output"]}) for r in range(size)
    }


def test_equal_evidence_finds_nothing() -> None:
    assert judge_replay(reports(4, {}), [(0, 1, 2, 3)], []) == []


@given(st.integers(3, 8), st.sampled_from(STAGES), st.data())
def test_a_rank_is_blamed_for_its_earliest_different_stage(
    size: int, stage: str, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    later = STAGES[STAGES.index(stage) :]
    found = judge_replay(reports(size, {rank: dict.fromkeys(later, BAD)}), [tuple(range(size))], [])
    assert [(f.ranks, f.what) for f in found] == [((rank,), stage)]
    assert len(found[0].signatures) == size


def test_two_ranks_with_other_wrong_values_are_both_named() -> None:
    wrong = {1: {"output": BAD}, 3: {"output": Signature(77, "xxh3")}}
    found = judge_replay(reports(5, wrong), [(0, 1, 2, 3, 4)], [])
    assert [f.ranks for f in found] == [(1, 3)]


def test_two_against_two_name_nobody_and_say_why() -> None:
    found = judge_replay(reports(4, {0: {"output": BAD}, 2: {"output": BAD}}), [(0, 1, 2, 3)], [])
    assert [f.ranks for f in found] == [()]
    assert "no strict majority" in found[0].why


def test_three_of_four_alike_wrong_ranks_blame_the_odd_one_not_the_three() -> None:
    wrong = {r: {"output": BAD} for r in (0, 1, 2)}
    assert [f.ranks for f in judge_replay(reports(4, wrong), [(0, 1, 2, 3)], [])] == [(3,)]


def test_peer_groups_are_judged_apart() -> None:
    found = judge_replay(reports(8, {5: {"output": BAD}}), [(0, 2, 4, 6), (1, 3, 5, 7)], [])
    assert [(f.ranks, f.peers) for f in found] == [((5,), (1, 3, 5, 7))]


def test_a_rank_without_evidence_is_not_blamed() -> None:
    broken = {**reports(3, {}), 1: Report(missing="out of memory")}
    found = judge_replay(broken, [(0, 1, 2)], [])
    assert all(f.ranks == () for f in found)
    assert found


def test_one_member_that_gathered_wrongly_is_named() -> None:
    wrong = {4: {"parameters": BAD, "output": BAD}}
    found = judge_replay(reports(6, wrong), [(0, 2, 4), (1, 3, 5)], [(0, 1), (2, 3), (4, 5)])
    assert [(f.reason, f.ranks) for f in found] == [("SDC_GATHER", (4,))]


def test_a_corrupt_shard_gathered_by_all_its_members_names_none_of_them() -> None:
    wrong = {r: {"parameters": BAD, "output": BAD} for r in (4, 5)}
    found = judge_replay(reports(6, wrong), [(0, 2, 4), (1, 3, 5)], [(0, 1), (2, 3), (4, 5)])
    assert [(f.reason, f.ranks, f.peers) for f in found] == [("SDC_SHARD", (), (4, 5))]


def test_what_follows_from_a_shard_the_audit_named_is_not_reported_again() -> None:
    wrong = {r: {"parameters": BAD, "output": BAD} for r in (4, 5)}
    gathers = [(0, 1), (2, 3), (4, 5)]
    groups = [(0, 2, 4), (1, 3, 5)]
    assert judge_replay(reports(6, wrong), groups, gathers, blamed=frozenset({5})) == []


def test_values_of_other_algorithms_are_not_comparable() -> None:
    found = judge_replay(reports(3, {1: {"output": Signature(2, "scout64")}}), [(0, 1, 2)], [])
    assert [(f.ranks, f.comparable) for f in found] == [((), False)]


@given(st.integers(3, 8), st.data())
def test_the_audit_names_the_replica_whose_state_differs(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    held = reports(size, {})
    held[rank] = replace(held[rank], state={"w": BAD})
    found = judge_state(held, [tuple(range(size))], ["w"])
    assert [(f.reason, f.ranks, f.what) for f in found] == [("SDC_STATE", (rank,), "w")]


def test_state_that_is_not_armed_is_not_judged() -> None:
    held = reports(3, {})
    held[1] = replace(held[1], state={"w": BAD})
    assert judge_state(held, [(0, 1, 2)], []) == []


def test_a_single_owner_has_no_replica_to_be_compared_with() -> None:
    assert judge_state(reports(3, {}), [(0,), (1,), (2,)], ["w"]) == []


@given(st.integers(1, 8), st.data())
def test_state_that_moved_at_rest_names_a_minority_only(size: int, data: st.DataObject) -> None:
    moved = data.draw(st.sets(st.integers(0, size - 1)))
    held = {r: Report(moved=("w",) if r in moved else ()) for r in range(size)}
    named = {rank for finding in judge_rest(held) for rank in finding.ranks}
    assert named == (moved if 2 * len(moved) < size else set())


def test_a_report_survives_the_wire() -> None:
    report = Report(GOOD, False, False, "why", float("inf"), None, {"w": BAD}, moved=("a",))
    assert Report.from_wire(report.to_wire()) == report


def test_a_report_of_another_version_is_refused() -> None:
    with pytest.raises(ScoutError, match="same SCOUT"):
        Report.from_wire(b"{}x")


def test_durations_leave_out_ranks_that_were_not_timed() -> None:
    timed = {0: Report(call_s=1.0), 1: Report(call_s=None), 2: Report(call_s=3.0)}
    assert durations(timed, (0, 1, 2)) == {0: 1.0, 2: 3.0}


def test_every_stage_has_a_reason() -> None:
    assert set(STAGES) <= set(replay_verdict.REASONS)
