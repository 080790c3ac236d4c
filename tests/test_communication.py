"""From timed collectives to a diagnosis."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from scout_core.decision.communication import (
    CommunicationCheck,
    CommunicationRule,
    GroupTiming,
)
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError

TOPOLOGY = Topology.from_degrees(d=2, s=4, t=4, order="dst", hosts=4)
KINDS = "dst"


class Job:
    """Times every group of a job; the groups of some ranks, or of all, are slower."""

    def __init__(self, seed: int, topology: Topology = TOPOLOGY, sigma: float = 0.01) -> None:
        self.noise = np.random.default_rng(seed)
        self.topology, self.sigma = topology, sigma
        self.slow: dict[tuple[str, int], float] = {}
        self.silent: set[int] = set()
        self.everything = 1.0

    def timings(self) -> list[GroupTiming]:
        return [
            self.timing(ranks, kind) for kind in KINDS for ranks in self.topology.axis_groups(kind)
        ]

    def timing(self, ranks: tuple[int, ...], kind: str) -> GroupTiming:
        factor = max([self.slow.get((kind, rank), 1.0) for rank in ranks])
        base = {"d": 0.020, "s": 0.010, "t": 0.002}[kind] * factor * self.everything
        seconds = base * math.exp(self.noise.normal(0, self.sigma))
        return GroupTiming(ranks, kind, {r: seconds for r in ranks if r not in self.silent})


def named(check: CommunicationCheck) -> set[tuple[str, int | None, str]]:
    return {(f.conclusion, f.rank, f.host) for f in check.diagnosis.findings}


def after(checks: int, job: Job, rule: CommunicationRule) -> list[CommunicationCheck]:
    return [rule.update(job.timings()) for _ in range(checks)]


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_slows_all_its_groups_is_named_and_nothing_else_before(seed: int) -> None:
    job, rule = Job(seed), CommunicationRule(TOPOLOGY)
    assert all(check.diagnosis.healthy for check in after(40, job, rule))
    rank = int(job.noise.integers(TOPOLOGY.world_size))
    job.slow = {(kind, rank): 1.3 for kind in KINDS}
    verdicts = [named(check) for check in after(10, job, rule)]
    assert next(verdict for verdict in verdicts if verdict) == verdicts[-1]
    assert verdicts[-1] == {("machine", rank, TOPOLOGY.hosts[rank])}


def test_a_slow_tensor_group_is_a_link() -> None:
    job, rule = Job(1), CommunicationRule(TOPOLOGY)
    after(20, job, rule)
    job.slow = {("t", 6): 1.5}
    assert named(after(6, job, rule)[-1]) == {("link", None, "host-1")}


def test_a_slow_group_across_machines_is_the_network() -> None:
    job, rule = Job(2), CommunicationRule(TOPOLOGY)
    after(20, job, rule)
    job.slow = {("s", 6): 1.5}
    assert named(after(6, job, rule)[-1]) == {("network", None, "")}


def test_a_slowdown_of_everything_is_the_cluster_and_is_seen_only_against_history() -> None:
    job, rule = Job(3), CommunicationRule(TOPOLOGY)
    after(40, job, rule)
    job.everything = 1.1
    check = after(15, job, rule)[-1]
    assert named(check) == {("cluster", None, "")}
    assert min(check.slowdowns.values()) == pytest.approx(1.1, abs=0.03)


def test_one_group_that_drifts_a_little_from_its_own_past_accuses_nobody() -> None:
    job, rule = Job(8), CommunicationRule(TOPOLOGY)
    after(40, job, rule)
    kind = random.choice(KINDS)
    job.slow = {(kind, random.randrange(TOPOLOGY.world_size)): 1.04}
    assert all(check.diagnosis.healthy for check in after(20, job, rule))


def test_a_compute_straggler_is_not_blamed_on_the_network() -> None:
    job, rule = Job(4), CommunicationRule(TOPOLOGY)
    after(20, job, rule)
    job.slow = {(kind, 6): 1.5 for kind in KINDS}
    checks = [rule.update(job.timings(), compute_stragglers=[6]) for _ in range(8)]
    assert all(check.diagnosis.healthy for check in checks)
    assert checks[-1].diagnosis.ignored


@pytest.mark.parametrize("broken", [None, math.nan])
def test_a_group_with_a_member_that_does_not_report_is_no_evidence(broken: float | None) -> None:
    job, rule = Job(5), CommunicationRule(TOPOLOGY)
    after(20, job, rule)
    job.slow = {(kind, 6): 1.5 for kind in KINDS}
    job.silent = {6} if broken is None else set()
    for _ in range(6):
        timings = [
            t
            if broken is None or 6 not in t.ranks
            else t._replace(seconds={**t.seconds, 6: broken})
            for t in job.timings()
        ]
        check = rule.update(timings)
    assert check.diagnosis.healthy
    assert {o.slow for o in check.observations if 6 in o.ranks} == {None}


def test_a_suspicion_is_not_settled_and_says_nothing_yet() -> None:
    job, rule = Job(6), CommunicationRule(TOPOLOGY)
    after(30, job, rule)
    job.slow = {("t", 6): 2.0}
    first = rule.update(job.timings())
    assert not first.settled
    assert first.diagnosis.healthy


@pytest.mark.parametrize("split", [0, 10, 21, 23])
def test_a_restart_changes_nothing(split: int) -> None:
    def run(restart: int) -> list[tuple[bool, set[tuple[str, int | None, str]]]]:
        job, rule, seen = Job(7), CommunicationRule(TOPOLOGY), []
        for number in range(26):
            if number == restart:
                plain = json.loads(json.dumps(rule.state()))
                rule = CommunicationRule.from_state(plain, TOPOLOGY)
            if number == 20:
                job.slow = {(kind, 9): 1.4 for kind in KINDS}
            check = rule.update(job.timings())
            seen.append((check.settled, named(check)))
        return seen

    assert run(split) == run(restart=-1)
    assert run(split)[-1][1] == {("machine", 9, "host-2")}


@pytest.mark.parametrize("slow", [(0,), (0, 1)])
def test_groups_that_nothing_can_judge_are_no_evidence(slow: tuple[int, ...]) -> None:
    """Two siblings, or two slow of four, before there is a history to compare with."""
    topology = Topology.from_degrees(d=2 * len(slow), s=2, order="sd", hosts=1)
    rule = CommunicationRule(topology)
    for _ in range(8):
        timings = [
            GroupTiming(ranks, "s", dict.fromkeys(ranks, 0.02 if ranks[0] in slow else 0.01))
            for ranks in topology.axis_groups("s")
        ]
        check = rule.update(timings)
    assert {o.slow for o in check.observations} == {None}
    assert check.diagnosis.healthy


def test_groups_inside_and_across_machines_are_no_siblings() -> None:
    topology = Topology.from_degrees(
        s=2, t=6, order="ts", hosts=["a", "a", "b", "b", "c", "c", "d", "d", "e", "f", "g", "h"]
    )
    rule = CommunicationRule(topology)
    for _ in range(8):
        timings = [
            GroupTiming(ranks, "s", dict.fromkeys(ranks, 0.01 if ranks[0] < 8 else 0.03))
            for ranks in topology.axis_groups("s")
        ]
        check = rule.update(timings)
    assert check.settled
    assert check.diagnosis.healthy


@pytest.mark.parametrize("damage", [{}, {"schema": "scout.communication/1"}])
def test_a_foreign_state_is_refused(damage: dict[str, str]) -> None:
    with pytest.raises(ScoutError, match=r"communication state .*start without it"):
        CommunicationRule.from_state(damage, TOPOLOGY)
