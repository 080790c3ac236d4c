"""Slow workers, and causes without a faulty rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.consensus import Status
from scout_core.decision.imbalance import Cause, Explanation, explain
from scout_core.decision.imbalance_incident import RULES, to_incident
from scout_core.decision.incident import Action, Incident, Kind
from scout_core.decision.work import Work, Worker, low_median, median
from scout_core.errors import ScoutError

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def job(
    seed: int, replicas: int = 4, stages: int = 4, batches: int = 4, steps: int = 16
) -> tuple[Work, np.random.Generator]:
    """A healthy job: 1 % noise per operation, 1.5 % per micro-batch; forward and backward."""
    noise = np.random.default_rng(seed)
    workers = tuple(
        Worker(stage * replicas + replica, replica, stage)
        for stage in range(stages)
        for replica in range(replicas)
    )
    shape = (steps, len(workers), 2, batches)
    data = noise.normal(0, 0.015, (steps, 1, replicas, 1, batches)).repeat(stages, axis=1)
    logs = noise.normal(0, 0.01, shape) + data.reshape(steps, len(workers), 1, batches)
    seconds = np.exp(logs) * np.array([0.07, 0.14])[:, None]
    numbers = tuple(range(100, 100 + 3 * steps, 3))
    return Work(workers, numbers, ("forward-compute", "backward-compute"), seconds), noise


def changed(work: Work, seconds: np.ndarray, **fields: Any) -> Work:
    return Work(work.workers, work.steps, work.operations, seconds, **fields)


def times(work: Work, factor: np.ndarray) -> Work:
    """Multiply (S, W), (S, W, M) or (W,) factors onto every operation."""
    if factor.ndim == 1:
        factor = factor[None, :, None]
    elif factor.ndim == 2:
        factor = factor[:, :, None]
    return changed(work, work.seconds * factor[:, :, None])


def causes(work: Work) -> list[tuple[Cause, tuple[int, ...]]]:
    return [(found.cause, found.ranks) for found in explain(work)]


def only(work: Work, cause: Cause) -> Explanation:
    (found,) = explain(work)
    assert found.cause is cause
    return found


@few
@given(seeds, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 6]))
def test_a_healthy_job_is_silent(seed: int, replicas: int, stages: int, batches: int) -> None:
    assert explain(job(seed, replicas, stages, batches)[0]) == ()


@few
@given(seeds, st.sampled_from([2, 3, 4, 8]), st.floats(1.15, 20))
def test_exactly_the_slow_worker_is_named(seed: int, replicas: int, factor: float) -> None:
    work, noise = job(seed, replicas)
    slow = int(noise.integers(len(work.workers)))
    each = np.ones(len(work.workers))
    each[slow] = factor
    found = only(times(work, each), Cause.STRAGGLER)
    assert found.ranks == (slow,)
    assert found.factor == pytest.approx(factor, rel=0.05)
    assert set(found.peers) == set(
        range(slow // replicas * replicas, (slow // replicas + 1) * replicas)
    )


@few
@given(seeds, st.sampled_from([1, 3]), st.integers(0, 3), st.floats(1.15, 4))
def test_a_stage_that_is_slow_on_all_its_ranks_is_nobodys_fault(
    seed: int, replicas: int, stage: int, factor: float
) -> None:
    work, _ = job(seed, replicas)
    each = np.array([factor if worker.stage == stage else 1.0 for worker in work.workers])
    found = only(times(work, each), Cause.STAGE)
    assert (found.ranks, found.stages) == ((), (stage,))
    assert found.factor == pytest.approx(factor, rel=0.03)
    assert found.certain == (replicas > 1)


def test_a_slow_worker_in_a_slow_stage_is_told_from_its_stage() -> None:
    work, _ = job(5, replicas=2)
    each = np.array([1.6 if worker.stage == 3 else 1.0 for worker in work.workers])
    each[7] *= 1.5
    assert causes(times(work, each)) == [(Cause.STRAGGLER, (7,)), (Cause.STAGE, ())]


def test_several_slow_workers_are_all_named() -> None:
    work, _ = job(6, replicas=5)
    each = np.ones(len(work.workers))
    each[[3, 4, 12]] = 1.5, 1.3, 1.2
    assert causes(times(work, each)) == [(Cause.STRAGGLER, (r,)) for r in (3, 4, 12)]


def test_a_worker_that_becomes_slow_is_named_from_then_on() -> None:
    work, _ = job(7)
    each = np.ones((len(work.steps), len(work.workers)))
    each[8:, 2] = 1.4
    found = only(times(work, each), Cause.STRAGGLER)
    assert (found.ranks, found.first_step, found.last_step) == ((2,), work.steps[8], work.steps[-1])


def test_a_worker_that_was_slow_for_two_steps_is_not_named() -> None:
    work, _ = job(8)
    each = np.ones((len(work.steps), len(work.workers)))
    each[8:10, 2] = 1.4
    assert Cause.STRAGGLER not in {cause for cause, _ in causes(times(work, each))}


@pytest.mark.parametrize("slow", [[0, 1], [0, 1, 2]])
def test_without_a_fast_majority_in_a_stage_nobody_is_named_but_it_is_said(slow: list[int]) -> None:
    work, _ = job(9)
    each = np.ones(len(work.workers))
    each[slow] = 1.4
    found = only(times(work, each), Cause.STRAGGLER)
    assert (found.ranks, found.certain, found.peers) == ((), False, (0, 1, 2, 3))


def test_two_peers_alone_cannot_say_which_is_slow() -> None:
    work, _ = job(10, replicas=2, stages=1)
    found = only(times(work, np.array([1.0, 1.4])), Cause.STRAGGLER)
    assert (found.ranks, found.certain) == ((), False)


def test_a_reference_that_is_faster_than_all_other_stages_proves_nothing() -> None:
    work, _ = job(11, replicas=2)
    each = np.array([0.6 if worker.stage == 0 else 1.0 for worker in work.workers])
    each[0] = 1.0
    found = only(times(work, each), Cause.STRAGGLER)
    assert (found.ranks, found.certain) == ((), False)


@few
@given(seeds, st.booleans())
def test_uneven_data_is_seen_in_all_stages_and_nobodys_fault(seed: int, slow: bool) -> None:
    work, noise = job(seed)
    lengths = np.exp(noise.normal(0, 0.3, (len(work.steps), 1, 4, 4))).repeat(4, axis=1)
    uneven = lengths.reshape(len(work.steps), 16, 4)
    each = np.ones(16)
    each[5] = 1.4 if slow else 1.0
    found = causes(times(times(work, uneven), each))
    assert found == [(Cause.STRAGGLER, (5,))] * slow + [(Cause.DATA, ())]


def test_token_counts_explain_uneven_data_without_stages() -> None:
    work, noise = job(12, replicas=8, stages=1, batches=1)
    lengths = np.exp(noise.normal(0, 0.2, (len(work.steps), 8, 1)))
    uneven = times(work, lengths)
    found = only(changed(work, uneven.seconds, tokens=4096 * lengths), Cause.DATA)
    assert found.evidence["explained_by"] == "tokens"
    assert found.evidence["always_replica"] is None
    assert len(found.evidence["last_replica_in_steps"]) > 2


def test_a_slow_worker_is_not_excused_by_token_counts_that_do_not_explain_it() -> None:
    work, noise = job(13, replicas=8, stages=1, batches=1)
    lengths = np.exp(noise.normal(0, 0.2, (len(work.steps), 8, 1)))
    each = np.ones(8)
    each[3] = 1.5
    uneven = times(times(work, lengths), each)
    found = causes(changed(work, uneven.seconds, tokens=4096 * lengths))
    assert found == [(Cause.STRAGGLER, (3,)), (Cause.DATA, ())]


def test_a_replica_that_always_has_more_data_is_not_a_slow_rank() -> None:
    work, _ = job(14)
    each = np.array([1.3 if worker.replica == 2 else 1.0 for worker in work.workers])
    found = only(times(work, each), Cause.DATA)
    assert found.evidence["always_replica"] == 2


def test_without_stages_and_tokens_alike_operations_still_show_uneven_data() -> None:
    work, noise = job(15, replicas=8, stages=1, batches=1)
    found = only(times(work, np.exp(noise.normal(0, 0.3, (len(work.steps), 8)))), Cause.DATA)
    assert found.evidence["explained_by"] == "operations"


def test_one_duration_per_rank_that_rotates_is_said_to_be_unexplained() -> None:
    work, noise = job(16, replicas=8, stages=1, batches=1)
    uneven = times(work, np.exp(noise.normal(0, 0.3, (len(work.steps), 8))))
    single = Work(work.workers, work.steps, ("compute",), uneven.seconds[:, :, :1])
    assert causes(single) == [(Cause.ROTATING, ())]


@few
@given(seeds, st.booleans())
def test_pauses_on_changing_ranks_are_nobodys_fault(seed: int, measured: bool) -> None:
    work, noise = job(seed)
    paused = np.where(noise.random(work.seconds.shape[:2]) < 0.3, 0.3, 0.0)
    seconds = work.seconds.copy()
    seconds[:, :, 0, 1] += paused
    found = only(changed(work, seconds, pauses_s=paused if measured else None), Cause.PAUSES)
    assert (found.ranks, found.evidence["measured"]) == ((), measured)
    assert found.evidence["longest_s"] == pytest.approx(0.3, abs=0.02)
    if not measured:
        assert found.evidence["share_in_forward"] == 1.0


def test_measured_pauses_explain_one_duration_per_rank_and_step() -> None:
    work, noise = job(24, replicas=8, stages=1, batches=1)
    paused = np.where(noise.random((16, 8)) < 0.3, 0.2, 0.0)
    seconds = work.seconds.sum(axis=2, keepdims=True) + paused[:, :, None, None]
    single = Work(work.workers, work.steps, ("compute",), seconds, pauses_s=paused)
    assert causes(single) == [(Cause.PAUSES, ())]


def test_waiting_for_data_is_nobodys_fault() -> None:
    work, noise = job(17)
    waits = np.where(noise.random(work.seconds.shape[:2]) < 0.2, 0.2, 0.0)
    found = only(changed(work, work.seconds, loading_s=waits), Cause.LOADING)
    assert found.ranks == ()
    assert explain(changed(work, work.seconds, loading_s=waits * 0.01)) == ()


def test_a_slowdown_of_everybody_names_nobody() -> None:
    work, _ = job(18, steps=40)
    factor = np.where(np.arange(40) < 20, 1.0, 1.3)[:, None]
    found = only(times(work, factor), Cause.SLOWDOWN)
    assert (found.ranks, found.first_step) == ((), work.steps[20])
    assert found.factor == pytest.approx(1.3, abs=0.02)


def test_a_worker_whose_durations_are_not_finite_is_named() -> None:
    work, _ = job(19)
    seconds = work.seconds.copy()
    seconds[:, 6, 0, 0] = math.inf
    broken = changed(work, seconds)
    found = only(broken, Cause.STRAGGLER)
    assert found.ranks == (6,)
    assert "durations that are not finite" in to_incident(found, broken).message


def test_missing_micro_batches_do_not_matter() -> None:
    work, noise = job(20)
    seconds = np.where(noise.random(work.seconds.shape) < 0.2, np.nan, work.seconds)
    assert explain(changed(work, seconds)) == ()
    seconds[:, 9] *= 1.5
    assert causes(changed(work, seconds)) == [(Cause.STRAGGLER, (9,))]


def test_fewer_than_three_steps_name_nobody() -> None:
    work, _ = job(21, steps=2)
    each = np.ones(16)
    each[5] = 3.0
    assert not any(ranks for _, ranks in causes(times(work, each)))


def test_a_straggler_incident_names_rank_host_and_place() -> None:
    work, _ = job(22)
    each = np.ones(16)
    each[5] = 1.5
    slow = times(work, each)
    (found,) = explain(slow)
    incident = to_incident(found, slow, hosts={5: "node-7"})
    (culprit,) = incident.culprits
    assert (culprit.rank, culprit.host) == (5, "node-7")
    assert culprit.coordinate is not None
    assert (culprit.coordinate.d, culprit.coordinate.p) == (1, 1)
    assert (incident.kind, incident.action) == (Kind.STRAGGLER, Action.REPLACE_MACHINE)
    assert "rank 5 on node-7 (replica 1, stage 1)" in incident.message
    assert Incident.from_json(incident.to_json()) == incident


def test_only_a_named_straggler_asks_for_a_machine() -> None:
    work, _ = job(23)
    each = np.ones(16)
    each[[0, 1]] = 1.4
    (found,) = explain(times(work, each))
    incident = to_incident(found, work)
    assert (incident.status, incident.action) == (Status.INCONCLUSIVE, Action.ESCALATE)
    assert "no strict majority" in incident.message


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.STRAGGLER])
def test_causes_without_a_faulty_rank_have_no_culprit(cause: Cause) -> None:
    rule = RULES[cause]
    assert rule.kind in (Kind.IMBALANCE, Kind.GROUP_SLOWDOWN)
    assert (rule.action is Action.NONE) == (rule.kind is Kind.IMBALANCE)


@given(st.lists(st.floats(0.1, 10) | st.just(math.nan), min_size=1, max_size=9))
def test_medians_leave_out_what_is_not_known(values: list[float]) -> None:
    array, known = np.array([values]), sorted(v for v in values if not math.isnan(v))
    if known:
        assert median(array, axis=1)[0] == pytest.approx(float(np.median(known)))
        assert low_median(array, axis=1)[0] == known[(len(known) - 1) // 2]
    else:
        assert np.isnan(median(array, axis=1)[0])


def test_seconds_of_another_shape_are_refused() -> None:
    with pytest.raises(ScoutError, match="seconds of shape"):
        Work((Worker(0),), (1, 2), ("a",), np.ones((2, 2, 1, 1)))
