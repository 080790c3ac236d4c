"""The hang verdict on snapshots: every recipe of the bug log, and properties of any verdict."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision import hang, snapshot_json
from scout_core.decision.consensus import Status
from scout_core.decision.evidence import Progress
from scout_core.decision.hang import (
    Channel,
    GroupState,
    HangDiagnosis,
    HangKind,
    Operation,
    Phase,
    ProcessState,
    RankSnapshot,
    diagnose,
    to_incident,
)
from scout_core.decision.hang_diagnosis import RULES
from scout_core.decision.incident import Action, Kind
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.lab.hang_model import Job, Side, Stopped, random_faults, run_until_stopped

DONE = 7
"""Operations that every group has completed before the trouble starts."""


def entered(name: str, arguments: str = "float32 x 4", site: str = "", n: int = 1) -> Operation:
    """The n-th operation after the completed ones."""
    return Operation(DONE + n, name, arguments, call_site=site)


def group(
    name: str, ranks: Sequence[int], *operations: Operation, done: int = DONE, backend: str = "gloo"
) -> GroupState:
    """A group in which everything up to `done` is complete and the operations are entered."""
    last = max((op.sequence for op in operations), default=DONE)
    return GroupState(
        name, tuple(ranks), last, min(done, last), operations=operations, backend=backend
    )


def waiting(
    rank: int, ranks: Sequence[int], operation: Operation | None = None, name: str = "world"
) -> RankSnapshot:
    """A rank that waits in the next operation of one group."""
    return RankSnapshot(
        rank, complete=("scout",), groups=(group(name, ranks, operation or entered("all_reduce")),)
    )


def idle(rank: int, ranks: Sequence[int], name: str = "world", **known: object) -> RankSnapshot:
    """A rank that has completed everything it entered."""
    snapshot = RankSnapshot(rank, complete=("scout",), groups=(group(name, ranks),))
    return replace(snapshot, **known)  # type: ignore[arg-type]


def all_but(odd: RankSnapshot, size: int) -> list[RankSnapshot]:
    """All ranks wait in one operation, apart from one."""
    world = range(size)
    return [odd if rank == odd.rank else waiting(rank, world) for rank in world]


def channel(
    peer: int, sending: bool, entered_count: int, done: int, *operations: Operation
) -> Channel:
    return Channel("pipe", peer, sending, entered_count, done, operations, "gloo")


ranks_and_size = st.integers(3, 9).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


# A rank that never arrives


@given(ranks_and_size)
def test_a_rank_that_skips_a_collective_is_the_one_who_never_arrived(case: tuple[int, int]) -> None:
    odd, size = case
    diagnosis = diagnose(all_but(idle(odd, range(size), where="train.py:31 step"), size))
    assert diagnosis.culprits == (odd,)
    assert diagnosis.kind is HangKind.NEVER_ARRIVED
    assert diagnosis.victims == tuple(rank for rank in range(size) if rank != odd)
    assert diagnosis.side == "cpu"
    assert diagnosis.findings[0].where == "train.py:31 step"


@given(ranks_and_size)
def test_a_rank_in_its_loader_stalls_the_input(case: tuple[int, int]) -> None:
    odd, size = case
    diagnosis = diagnose(all_but(idle(odd, range(size), phase=Phase.DATA), size))
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.INPUT_STALL)


@given(ranks_and_size)
def test_a_rank_that_does_not_return_from_a_save_stalls_the_checkpoint(
    case: tuple[int, int],
) -> None:
    odd, size = case
    diagnosis = diagnose(all_but(idle(odd, range(size), phase=Phase.CHECKPOINT), size))
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.CHECKPOINT_STALL)


def test_half_of_the_ranks_can_be_absent_and_are_named() -> None:
    world = range(8)
    snapshots = [idle(r, world) if r % 2 == 0 else waiting(r, world) for r in world]
    assert diagnose(snapshots).culprits == (0, 2, 4, 6)


def test_a_rank_that_has_finished_its_shorter_epoch_is_named_with_the_reason() -> None:
    for left in ({"phase": Phase.FINISHED}, {"state": ProcessState.EXITED}):
        diagnosis = diagnose(all_but(idle(1, range(4), **left), 4))
        assert (diagnosis.culprits, diagnosis.kind) == ((1,), HangKind.NEVER_ARRIVED)
        assert "has " in diagnosis.findings[0].explanation


def test_a_stage_zero_rank_in_its_loader_is_the_only_culprit_of_a_whole_pipeline() -> None:
    job = Job(tensor=1, data=4, stages=2)
    for odd in range(4):
        fault = random_faults(job, random.Random(odd), 1, Side.CPU)[0]._replace(rank=odd, at=4)
        snapshots = run_until_stopped(job, [fault]).snapshots()
        snapshots[odd] = replace(snapshots[odd], phase=Phase.DATA)
        diagnosis = diagnose(snapshots)
        assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.INPUT_STALL)


def test_extra_collectives_in_a_group_of_its_own_do_not_hide_the_culprit() -> None:
    world = range(4)
    extra = GroupState("pair", (1, 2), 40, 40)
    snapshots = [idle(1, world) if r == 1 else waiting(r, world) for r in world]
    snapshots = [
        replace(s, groups=(*s.groups, extra)) if s.rank in (1, 2) else s for s in snapshots
    ]
    assert diagnose(snapshots).culprits == (1,)


def test_an_outstanding_operation_does_not_excuse_a_rank_that_is_known_to_be_elsewhere() -> None:
    posted = channel(1, False, 3, 2, Operation(3, "recv"))
    snapshots = [
        RankSnapshot(0, blocked=False, where="train.py:9 sleep", channels=(posted,)),
        RankSnapshot(1, channels=(channel(0, True, 2, 2), channel(0, False, 1, 0))),
    ]
    assert diagnose(snapshots).culprits == (0,)


# Members that entered different operations


@given(ranks_and_size, st.sampled_from(["broadcast", "all_gather", "barrier"]))
def test_a_rank_that_entered_another_operation_diverged(case: tuple[int, int], name: str) -> None:
    odd, size = case
    site = entered(name, site="train.py:50 epoch_end")
    diagnosis = diagnose(all_but(waiting(odd, range(size), site), size))
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.MISMATCH)
    assert "train.py:50 epoch_end" in diagnosis.findings[0].explanation


def test_a_rank_with_another_size_diverged() -> None:
    diagnosis = diagnose(all_but(waiting(2, range(4), entered("all_reduce", "float32 x 64")), 4))
    assert (diagnosis.culprits, diagnosis.kind) == ((2,), HangKind.MISMATCH)


def test_two_camps_of_equal_size_name_nobody_but_show_both_call_sites() -> None:
    world = range(8)
    first, second = (entered(n, site=f"{n}.py:1") for n in ("all_gather", "all_reduce"))
    snapshots = [waiting(r, world, first if r < 4 else second) for r in world]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.MISMATCH)
    assert diagnosis.status is Status.INCONCLUSIVE
    assert "all_gather.py:1" in diagnosis.explanation
    assert "all_reduce.py:1" in diagnosis.explanation


def test_two_ranks_at_different_numbers_show_their_first_divergence() -> None:
    world = (0, 1)
    gather = [
        Operation(DONE + n, "all_gather", "bf16 x 2", call_site="b.py:2") for n in range(1, 6)
    ]
    ahead = RankSnapshot(1, groups=(group("world", world, *gather),))
    behind = waiting(0, world, entered("reduce_scatter", site="a.py:1"))
    diagnosis = diagnose([behind, ahead])
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.MISMATCH)
    assert f"#{DONE + 1}" in diagnosis.explanation
    assert "a.py:1" in diagnosis.explanation
    assert "b.py:2" in diagnosis.explanation


def test_a_late_rank_with_another_size_is_behind_and_diverged() -> None:
    world = range(3)
    small, large = entered("broadcast", "int64 x 64"), entered("broadcast", "int64 x 24084544")
    ahead = group("world", world, small, entered("broadcast", "int64 x 9", n=3), done=DONE + 2)
    snapshots = [
        waiting(0, world, large),
        RankSnapshot(1, groups=(ahead,)),
        waiting(2, world, small),
    ]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((0,), HangKind.MISMATCH)


def test_what_a_rank_entered_is_not_known_is_no_vote() -> None:
    world = range(4)
    odd = waiting(0, world, entered("broadcast"))
    unknown = [
        RankSnapshot(r, groups=(GroupState("world", tuple(world), DONE + 1, DONE),)) for r in (2, 3)
    ]
    diagnosis = diagnose([odd, waiting(1, world), *unknown])
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.MISMATCH)


def test_a_divergence_that_everybody_has_completed_is_not_the_cause() -> None:
    world = range(3)
    old = [Operation(DONE, "reduce" if r else "all_reduce", "float32 x 4") for r in world]
    snapshots = [
        RankSnapshot(r, groups=(group("world", world, old[r], entered("all_reduce")),))
        for r in (0, 1)
    ]
    diagnosis = diagnose([*snapshots, RankSnapshot(2, groups=(group("world", world, old[2]),))])
    assert (diagnosis.culprits, diagnosis.kind) == ((2,), HangKind.NEVER_ARRIVED)


@given(st.integers(0, 3))
def test_an_extra_collective_of_one_rank_in_another_group_is_named_by_the_majority(
    odd: int,
) -> None:
    world = tuple(range(4))
    snapshots = []
    for rank in world:
        extra = [entered("all_reduce", site="eval.py:3 metric")] if rank == odd else []
        step = [] if rank == odd else [entered("all_gather")]
        groups = (group("eval", world, *extra), group("dp", world, *step))
        snapshots.append(RankSnapshot(rank, groups=groups))
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.MISMATCH)
    assert "eval.py:3 metric" in diagnosis.findings[0].explanation


def test_ranks_without_tokens_that_skip_the_expert_reduction_are_named_by_the_majority() -> None:
    world = tuple(range(8))
    skipped = (2, 5)
    snapshots = []
    for rank in world:
        expert = [] if rank in skipped else [entered("reduce_scatter", "bf16 x 16")]
        dense = [entered("all_reduce")] if rank in skipped else []
        groups = (group("expert", world, *expert), group("dense", world, *dense))
        snapshots.append(RankSnapshot(rank, groups=groups))
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == (skipped, HangKind.MISMATCH)


def test_two_halves_that_wait_for_each_other_in_two_groups_are_a_cycle_without_culprit() -> None:
    world = tuple(range(4))
    snapshots = []
    for rank in world:
        expert, dense = ([entered("all_reduce")], []) if rank < 2 else ([], [entered("all_gather")])
        groups = (group("expert", world, *expert), group("dense", world, *dense))
        snapshots.append(RankSnapshot(rank, groups=groups))
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.CYCLE)


def test_a_rank_that_built_the_group_with_other_members_is_named() -> None:
    ours, theirs = (0, 1, 2, 3), (0, 1, 2)
    snapshots = [waiting(r, ours if r != 3 else (1, 2, 3)) for r in range(4)]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((3,), HangKind.MISMATCH)
    assert "[1, 2, 3]" in diagnosis.findings[0].explanation
    assert theirs != ours


def test_groups_of_one_name_without_common_members_are_just_two_groups() -> None:
    snapshots = [waiting(r, (0, 1, 2), name="1") for r in (0, 1)]
    snapshots += [idle(2, (0, 1, 2), name="1"), *(idle(r, (3, 4), name="1") for r in (3, 4))]
    assert diagnose(snapshots).culprits == (2,)


# Sends, receives and circles


@given(st.integers(2, 8))
def test_a_ring_of_receives_before_sends_is_a_cycle_of_all(size: int) -> None:
    snapshots = [
        RankSnapshot(
            r,
            complete=("scout",),
            channels=(channel((r - 1) % size, False, 1, 0, Operation(1, "recv")),),
        )
        for r in range(size)
    ]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.CYCLE)
    assert diagnosis.involved == tuple(range(size))
    assert len(diagnosis.evidence["cycle"]) == size


def test_two_blocking_sends_to_each_other_are_a_cycle_of_two() -> None:
    snapshots = [
        RankSnapshot(
            r,
            complete=("scout",),
            channels=(
                channel(1 - r, True, 1, 0, Operation(1, "send")),
                channel(1 - r, False, 0, 0),
            ),
        )
        for r in (0, 1)
    ]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.kind, diagnosis.involved) == (HangKind.CYCLE, (0, 1))


def test_a_send_without_a_receive_names_the_rank_that_does_not_receive() -> None:
    sender = RankSnapshot(0, channels=(channel(1, True, 1, 0, Operation(1, "send")),))
    diagnosis = diagnose([sender, RankSnapshot(1, complete=("scout",), blocked=False)])
    assert (diagnosis.culprits, diagnosis.victims) == ((1,), (0,))


def test_swapped_tags_on_one_channel_show_both_orders_and_name_nobody() -> None:
    first, second = (
        Operation(1, "send", "float32 x 4 tag 1"),
        Operation(1, "recv", "float32 x 4 tag 2"),
    )
    snapshots = [
        RankSnapshot(0, channels=(channel(1, True, 1, 0, first),)),
        RankSnapshot(1, channels=(channel(0, False, 1, 0, second),)),
    ]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.MISMATCH)
    assert "tag 1" in diagnosis.explanation
    assert "tag 2" in diagnosis.explanation


def test_a_send_that_may_already_be_received_blames_neither_end() -> None:
    snapshots = [
        RankSnapshot(0, channels=(Channel("pipe", 1, True, operations=(Operation(1, "send"),)),)),
        RankSnapshot(1, channels=(Channel("pipe", 0, True, operations=(Operation(1, "send"),)),)),
    ]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.EVIDENCE_MISSING)


# Everybody has joined


@given(st.integers(2, 9))
def test_when_all_have_joined_nobody_is_named_and_the_network_is_suspected(size: int) -> None:
    diagnosis = diagnose([waiting(r, range(size)) for r in range(size)])
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.GROUP_STALL)
    assert diagnosis.involved == tuple(range(size))
    assert to_incident(diagnosis).action is Action.DIAGNOSE_NETWORK


def test_the_stalled_group_is_the_one_that_its_members_entered_first() -> None:
    world = tuple(range(4))
    snapshots = []
    for rank in world:
        old = replace(entered("all_gather"), age_s=9.0)
        new = replace(entered("all_reduce"), age_s=1.0)
        pair = tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))
        groups = [group(f"tp-{rank // 2}", pair, old)] if rank < 2 else []
        snapshots.append(RankSnapshot(rank, groups=(*groups, group("world", world, new))))
    assert diagnose(snapshots).involved == (0, 1)


def test_identical_coordinates_without_any_operation_are_a_group_stall() -> None:
    snapshots = [RankSnapshot(r, progress=Progress(5, 2)) for r in range(4)]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.GROUP_STALL)


@given(ranks_and_size)
def test_a_stale_coordinate_names_the_laggard_where_no_operation_is_known(
    case: tuple[int, int],
) -> None:
    odd, size = case
    places = [Progress(5, 1 if r == odd else 4) for r in range(size)]
    diagnosis = diagnose(RankSnapshot(r, progress=places[r]) for r in range(size))
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.NEVER_ARRIVED)


def test_a_coordinate_ahead_of_the_others_is_not_a_culprit() -> None:
    snapshots = [RankSnapshot(r, progress=Progress(5, 9 if r == 0 else 4)) for r in range(4)]
    assert diagnose(snapshots).culprits == ()


def test_all_ranks_waiting_for_data_are_an_input_stall_of_nobody() -> None:
    snapshots = [RankSnapshot(r, phase=Phase.DATA) for r in range(4)]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.INPUT_STALL)
    assert diagnosis.involved == (0, 1, 2, 3)


# Devices


@given(ranks_and_size, st.integers(1, 3))
def test_a_device_that_does_not_finish_what_others_completed_is_stuck(
    case: tuple[int, int], more: int
) -> None:
    odd, size = case
    world = range(size)
    stuck = group("tp", world, entered("all_gather"), backend="nccl")
    ahead = group("tp", world, entered("all_reduce", n=1 + more), done=DONE + more, backend="nccl")
    snapshots = [RankSnapshot(r, groups=(stuck if r == odd else ahead,)) for r in world]
    diagnosis = diagnose(snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.GPU_STUCK)
    assert diagnosis.side == "gpu"


def test_a_broadcast_that_its_root_completed_early_does_not_blame_a_receiver() -> None:
    world, pair = range(3), (1, 2)
    behind = group("tp", world, entered("broadcast"), backend="nccl")
    root = group("tp", world, entered("broadcast"), done=DONE + 1, backend="nccl")
    snapshots = [
        RankSnapshot(0, groups=(root,)),
        RankSnapshot(1, groups=(behind, group("dp", pair, entered("all_reduce"), backend="nccl"))),
        RankSnapshot(2, groups=(behind, group("dp", pair, backend="nccl")), blocked=False),
    ]
    assert diagnose(snapshots).culprits == (2,)


def test_a_device_that_has_not_begun_what_its_peers_are_in_holds_them_up() -> None:
    world = range(4)
    states = [
        replace(group("tp", world, entered("all_reduce"), backend="nccl"), started=DONE + (r != 2))
        for r in world
    ]
    diagnosis = diagnose(RankSnapshot(r, groups=(states[r],)) for r in world)
    assert (diagnosis.culprits, diagnosis.kind) == ((2,), HangKind.GPU_STUCK)


# Processes and nodes


@given(ranks_and_size)
def test_a_killed_rank_is_named_and_not_the_ranks_that_wait_for_it(case: tuple[int, int]) -> None:
    odd, size = case
    dead = idle(odd, range(size), state=ProcessState.DEAD, exit_code=-9)
    diagnosis = diagnose(all_but(dead, size))
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.PROCESS_DEAD)
    assert "SIGKILL" in diagnosis.findings[0].explanation
    assert to_incident(diagnosis).kind is Kind.PROCESS_DEAD


def test_a_rank_killed_while_it_waited_itself_is_named() -> None:
    killed = replace(waiting(1, range(4)), state=ProcessState.DEAD, exit_code=-9)
    diagnosis = diagnose(all_but(killed, 4))
    assert (diagnosis.culprits, diagnosis.victims) == ((1,), (0, 2, 3))


def test_a_rank_that_raised_is_named_with_its_error_and_those_who_died_of_it_are_not() -> None:
    raised = idle(2, range(4), state=ProcessState.DEAD, exit_code=1, state_age_s=3.0, error="NaN")
    others = [
        replace(waiting(r, range(4)), state=ProcessState.DEAD, exit_code=1, state_age_s=2.9)
        for r in (0, 1, 3)
    ]
    diagnosis = diagnose([raised, *others])
    assert (diagnosis.culprits, diagnosis.kind) == ((2,), HangKind.PROCESS_DEAD)
    assert "NaN" in diagnosis.findings[0].explanation


@pytest.mark.parametrize(("exit_code", "culprits"), [(-6, (1,)), (1, (1,)), (-9, (1, 3))])
def test_who_is_aborted_because_operations_do_not_fit_is_not_named(
    exit_code: int, culprits: tuple[int, ...]
) -> None:
    world = range(4)
    odd = waiting(1, world, entered("all_reduce", "float32 x 64"))
    aborted = replace(waiting(3, world), state=ProcessState.DEAD, exit_code=exit_code)
    diagnosis = diagnose([aborted if s.rank == 3 else s for s in all_but(odd, 4)])
    assert diagnosis.culprits == culprits


def test_a_stopped_process_is_named_although_it_waits_like_the_others() -> None:
    stopped = replace(waiting(3, range(4)), state=ProcessState.STOPPED)
    diagnosis = diagnose(all_but(stopped, 4))
    assert (diagnosis.culprits, diagnosis.kind) == ((3,), HangKind.PROCESS_STOPPED)


def test_all_ranks_of_a_node_that_does_not_answer_are_named() -> None:
    world = range(8)
    gone = [RankSnapshot(r, host="b", state=ProcessState.UNREACHABLE) for r in (4, 5, 6, 7)]
    diagnosis = diagnose([*(waiting(r, world) for r in range(4)), *gone])
    assert (diagnosis.culprits, diagnosis.kind) == ((4, 5, 6, 7), HangKind.NODE_UNREACHABLE)
    assert to_incident(diagnosis).action is Action.REPLACE_MACHINE


# No fault


def test_a_healthy_job_has_no_culprit() -> None:
    stopped = run_until_stopped(Job(), [])
    diagnosis = diagnose(stopped.snapshots())
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.victims) == (HangKind.NONE, (), ())
    assert diagnosis.status is Status.AGREE


@given(ranks_and_size, st.sampled_from([Phase.INITIALIZE, Phase.EVALUATION, Phase.CHECKPOINT]))
def test_waiting_for_a_rank_that_is_within_its_limit_is_no_fault(
    case: tuple[int, int], phase: Phase
) -> None:
    odd, size = case
    busy = idle(odd, range(size), phase=phase, within_limit=True)
    assert diagnose(all_but(busy, size)).kind is HangKind.NONE


def test_idle_and_finished_jobs_are_no_hang() -> None:
    for phase in (Phase.IDLE, Phase.FINISHED):
        snapshots = [RankSnapshot(r, phase=phase, progress=Progress(3, 0)) for r in range(4)]
        assert diagnose(snapshots).kind is HangKind.NONE


def test_no_snapshot_at_all_is_no_verdict() -> None:
    assert diagnose([]).kind is HangKind.NONE


# Missing evidence


@given(ranks_and_size)
def test_a_rank_without_evidence_is_never_blamed(case: tuple[int, int]) -> None:
    odd, size = case
    for gone in ([], [RankSnapshot(odd, missing="no dump")]):
        snapshots = [waiting(r, range(size)) for r in range(size) if r != odd]
        diagnosis = diagnose([*snapshots, *gone])
        assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.EVIDENCE_MISSING)
        assert diagnosis.unseen == (odd,)


def test_a_missing_rank_does_not_hide_a_culprit_that_is_seen() -> None:
    snapshots = all_but(idle(1, range(4)), 4)
    diagnosis = diagnose([s for s in snapshots if s.rank != 3])
    assert (diagnosis.culprits, diagnosis.unseen) == ((1,), (3,))


def test_a_rank_whose_ring_lost_operations_is_not_proved_absent() -> None:
    sender = RankSnapshot(
        0, channels=(Channel("pipe", 1, True, operations=(Operation(1, "send"),)),)
    )
    diagnosis = diagnose([sender, RankSnapshot(1, truncated=True)])
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.EVIDENCE_MISSING)


def test_a_ring_that_wrapped_but_kept_its_counts_still_proves_absence() -> None:
    late = idle(1, range(4), truncated=True)
    assert diagnose(all_but(late, 4)).culprits == (1,)
    assert diagnose(all_but(replace(late, complete=()), 4)).culprits == ()


def test_unknown_counts_are_neither_arrival_nor_absence() -> None:
    unknown = RankSnapshot(0, groups=(GroupState("world", (0, 1, 2), None),))
    diagnosis = diagnose([unknown, *(waiting(r, range(3)) for r in (1, 2))])
    assert (diagnosis.kind, diagnosis.unseen) == (HangKind.EVIDENCE_MISSING, (0,))


def test_ranks_that_may_wait_in_operations_nobody_shows_are_not_blamed_together() -> None:
    world = range(4)
    quiet = [idle(r, world, unseen_p2p=True) for r in (0, 1)]
    both = diagnose([*quiet, *(waiting(r, world) for r in (2, 3))])
    one = diagnose([quiet[0], *(waiting(r, world) for r in (1, 2, 3))])
    assert (both.culprits, both.kind, both.unseen) == ((), HangKind.EVIDENCE_MISSING, (0, 1))
    assert one.culprits == (0,)


def test_counts_of_different_counters_are_not_compared() -> None:
    other = replace(group("world", range(3)), counter="c10d", enqueued=99, completed=99)
    snapshots = [waiting(r, range(3)) for r in (0, 1)]
    diagnosis = diagnose([*snapshots, RankSnapshot(2, groups=(other,))])
    assert diagnosis.kind is HangKind.EVIDENCE_MISSING


def test_two_snapshots_of_one_rank_are_a_mistake() -> None:
    with pytest.raises(ScoutError, match="rank 1 has two snapshots"):
        diagnose([RankSnapshot(1), RankSnapshot(1)])


# Properties of every verdict, on a model of a tensor x data x pipeline parallel job


@st.composite
def stopped_jobs(draw: Callable[[st.SearchStrategy[int]], int]) -> tuple[Stopped, tuple[int, ...]]:
    """(a stopped job, the ranks that were made to fail)."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    job = Job(rng.choice([2, 4]), rng.choice([2, 4]), rng.choice([1, 2, 4]), micro_batches=2)
    faults = random_faults(job, rng, rng.choice([1, 2]), rng.choice(list(Side)))
    stopped = run_until_stopped(job, faults, run_ahead=rng.choice([6, 12]))
    return stopped, tuple(fault.rank for fault in faults)


few = settings(max_examples=40)
seeds = st.integers(0, 10**6).map(random.Random)


@few
@given(stopped_jobs())
def test_exactly_the_injected_ranks_are_named_or_the_group_that_failed_as_a_whole(
    case: tuple[Stopped, tuple[int, ...]],
) -> None:
    stopped, injected = case
    diagnosis = diagnose(stopped.snapshots())
    whole_group = diagnosis.kind is HangKind.GROUP_STALL and diagnosis.involved == injected
    assert diagnosis.culprits == injected or whole_group


@few
@given(stopped_jobs(), seeds)
def test_relabelled_ranks_keep_their_blame(
    case: tuple[Stopped, tuple[int, ...]], rng: random.Random
) -> None:
    snapshots = case[0].snapshots()
    new = list(range(len(snapshots)))
    rng.shuffle(new)
    before, after = diagnose(snapshots), diagnose(_relabel(s, new) for s in snapshots)
    assert after.kind is before.kind
    assert after.culprits == tuple(sorted(new[rank] for rank in before.culprits))
    assert after.victims == tuple(sorted(new[rank] for rank in before.victims))


@few
@given(stopped_jobs(), seeds)
def test_the_order_of_the_snapshots_does_not_matter(
    case: tuple[Stopped, tuple[int, ...]], rng: random.Random
) -> None:
    snapshots = case[0].snapshots()
    before = diagnose(snapshots)
    rng.shuffle(snapshots)
    assert diagnose(snapshots) == before


@few
@given(stopped_jobs())
def test_more_victims_change_nothing(case: tuple[Stopped, tuple[int, ...]]) -> None:
    snapshots = case[0].snapshots()
    before = diagnose(snapshots)
    new = len(snapshots)
    followers = [
        replace(waiting(new + i, (victim, new + i), name=f"new-{i}"), complete=("scout",))
        for i, victim in enumerate(before.victims[:3])
    ]
    after = diagnose([*snapshots, *followers])
    assert (after.culprits, after.kind) == (before.culprits, before.kind)
    assert set(after.victims) == {*before.victims, *(s.rank for s in followers)}


@few
@given(stopped_jobs(), seeds)
def test_losing_evidence_never_blames_an_innocent(
    case: tuple[Stopped, tuple[int, ...]], rng: random.Random
) -> None:
    stopped, injected = case
    snapshots = [_lose_something(s, rng) for s in stopped.snapshots()]
    diagnosis = diagnose(snapshots)
    assert set(diagnosis.culprits) <= set(injected)
    assert not set(diagnosis.culprits) & set(diagnosis.victims)


@few
@given(stopped_jobs())
def test_snapshots_survive_the_wire(case: tuple[Stopped, tuple[int, ...]]) -> None:
    for snapshot in case[0].snapshots():
        assert snapshot_json.from_json(snapshot_json.to_json(snapshot)) == snapshot


# The incident


def test_the_incident_says_who_where_what_and_what_to_do() -> None:
    late = idle(2, range(4), host="node-7", where="data.py:40 fetch", phase_age_s=31.0)
    topology = Topology.from_degrees(d=4)
    incident = to_incident(diagnose(all_but(late, 4)), topology=topology, job="run-1")
    assert incident.reason == "HANG_NEVER_ARRIVED"
    assert incident.culprit_ranks == (2,)
    assert incident.culprits[0].coordinate == topology.dense[2]
    for part in (
        "rank 2 on node-7",
        "data.py:40 fetch",
        "3 of 4 members wait",
        "3 ranks only wait",
    ):
        assert part in incident.message
    assert incident.from_json(incident.to_json()) == incident


def test_the_same_verdict_has_the_same_id_on_every_observer() -> None:
    snapshots = all_but(idle(1, range(4)), 4)
    again = [replace(s, phase_age_s=40.0) for s in reversed(snapshots)]
    assert to_incident(diagnose(snapshots)).id == to_incident(diagnose(again)).id


def test_every_reason_is_explained_to_operators() -> None:
    page = (pathlib.Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    for kind, rule in RULES.items():
        section = page.partition(f"### {rule.reason}\n")[2].partition("\n### ")[0]
        for part in ("**Meaning.**", "**Typical causes.**", "**To do.**"):
            assert part in section, f"{kind.value}: {rule.reason} lacks {part}"
    assert set(RULES) == set(HangKind) - {HangKind.NONE}


def test_no_hang_is_no_incident() -> None:
    with pytest.raises(ScoutError, match="not an incident"):
        to_incident(HangDiagnosis((), (), HangKind.NONE))


@pytest.mark.parametrize("side", list(Side))
def test_sixteen_thousand_ranks_in_ten_thousand_groups_are_diagnosed(side: Side) -> None:
    job = Job(tensor=2, data=1024, stages=8, micro_batches=1, layers=1, steps=1)
    faults = random_faults(job, random.Random(3), 1, side)
    diagnosis = diagnose(run_until_stopped(job, faults).snapshots())
    assert len(job.groups) > 8_000
    assert diagnosis.culprits == (faults[0].rank,)
    assert len(diagnosis.victims) == job.world_size - 1


def _relabel(snapshot: RankSnapshot, new: Sequence[int]) -> RankSnapshot:
    return replace(
        snapshot,
        rank=new[snapshot.rank],
        groups=tuple(replace(g, ranks=tuple(new[r] for r in g.ranks)) for g in snapshot.groups),
        channels=tuple(replace(c, peer=new[c.peer]) for c in snapshot.channels),
    )


def _lose_something(snapshot: RankSnapshot, rng: random.Random) -> RankSnapshot:
    """Take away a part of what is known, and mark it as the sources do."""
    loss = rng.randrange(5)
    if loss == 0:
        return RankSnapshot(snapshot.rank, missing="no dump")
    if loss == 1:
        groups = tuple(replace(g, enqueued=None, completed=None) for g in snapshot.groups)
        return replace(snapshot, groups=groups, complete=())
    if loss == 2:
        groups = tuple(g for g in snapshot.groups if rng.random() < 0.5)
        return replace(snapshot, groups=groups, complete=(), truncated=True)
    if loss == 3:
        return replace(snapshot, channels=(), complete=(), truncated=True)
    return snapshot


def test_hang_exports_what_the_design_names() -> None:
    assert hang.diagnose is diagnose
    assert hang.HangDiagnosis is HangDiagnosis
