"""Cross-process-group localisation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scale
from scout_core.decision.localize import Diagnosis, Finding, Observation, localize
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError

# The paper's example: 4x2 DP-FSDP grid, two TP slices; ranks r and r + 8 share a machine.
PAPER = Topology.from_degrees(
    d=4, s=2, t=2, order="tds", hosts=[f"host-{rank % 8}" for rank in range(16)]
)
PAPER_WITHOUT_HOSTS = Topology.from_degrees(d=4, s=2, t=2, order="tds")
CLUSTER = Topology.from_degrees(d=4, s=4, p=2, t=4, order="dspt", hosts=4)
few = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def observed(topology: Topology, slow: set[tuple[int, ...]], kinds: str) -> list[Observation]:
    return [
        Observation(ranks, kind, ranks in slow)
        for kind in kinds
        for ranks in topology.axis_groups(kind)
    ]


def found(slow: set[tuple[int, ...]], topology: Topology = PAPER) -> tuple[Finding, ...]:
    observations = observed(topology, slow, "st")
    assert slow <= {o.ranks for o in observations}
    return localize(topology, observations).findings


def around(topology: Topology, rank: int, kinds: str) -> set[tuple[int, ...]]:
    """The groups that a rank slows down."""
    return {ranks for kind in kinds for ranks in topology.axis_groups(kind) if rank in ranks}


def named(diagnosis: Diagnosis) -> set[tuple[str, int | None, str]]:
    return {(f.conclusion, f.rank, f.host) for f in diagnosis.findings}


def test_the_papers_slow_fsdp_and_tp_group_meet_in_rank_4_and_its_machine() -> None:
    (finding,) = found({(4, 5), (4, 12)})
    assert (finding.conclusion, finding.rank, finding.host) == ("machine", 4, "host-4")
    assert finding.suspects == (4,)
    assert {o.ranks for o in finding.supporting} == {(4, 5), (4, 12)}
    assert finding.contradicting == ()


def test_a_slow_tp_group_alone_is_a_link_inside_its_machine() -> None:
    (finding,) = found({(4, 12)})
    assert (finding.conclusion, finding.rank, finding.host) == ("link", None, "host-4")
    assert finding.suspects == (4, 12)
    assert {o.ranks for o in finding.contradicting} == {(4, 5), (12, 13)}


def test_a_slow_fsdp_group_across_machines_alone_is_the_network_and_names_no_rank() -> None:
    (finding,) = found({(4, 5)})
    assert (finding.conclusion, finding.rank, finding.host) == ("network", None, "")


@pytest.mark.parametrize(
    "slow",
    [
        {(0, 8), (2, 3), (4, 12), (14, 15)},
        {(0, 1), (2, 3), (12, 13), (14, 15), (4, 5)},
        {(0, 8), (2, 10), (4, 12)},
        set(PAPER.axis_groups("s")),
        set(PAPER.axis_groups("t")),
        set(PAPER.axis_groups("s") + PAPER.axis_groups("t")),
    ],
)
def test_many_slow_groups_on_many_machines_are_the_cluster_and_name_no_hardware(
    slow: set[tuple[int, ...]],
) -> None:
    (finding,) = found(slow)
    assert (finding.conclusion, finding.rank, finding.host) == ("cluster", None, "")
    assert {o.ranks for o in finding.supporting} == slow


def test_nothing_slow_is_no_finding() -> None:
    assert localize(PAPER, observed(PAPER, set(), "dst")).healthy
    assert localize(PAPER, []).healthy


@few
@given(seeds)
def test_any_rank_is_named_by_its_two_slow_groups(seed: int) -> None:
    rank = seed % 16
    diagnosis = localize(PAPER, observed(PAPER, around(PAPER, rank, "st"), "st"))
    assert named(diagnosis) == {("machine", rank, f"host-{rank % 8}")}


@few
@given(seeds)
def test_the_order_of_observations_and_members_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = observed(PAPER, set(), "dst")
    groups = [o._replace(slow=bool(rng.random() < 0.2)) for o in groups]
    shuffled = [
        (tuple(rng.permutation(groups[i].ranks).tolist()), groups[i].kind, groups[i].slow)
        for i in rng.permutation(len(groups))
    ]
    assert named(localize(PAPER, shuffled)) == named(localize(PAPER, groups))


@few
@given(seeds)
def test_a_relabelled_rank_keeps_its_blame(seed: int) -> None:
    new = np.random.default_rng(seed).permutation(16).tolist()
    old = {name: rank for rank, name in enumerate(new)}
    renamed = Topology.from_coordinates(
        [PAPER.dense[old[r]] for r in range(16)], hosts=[PAPER.hosts[old[r]] for r in range(16)]
    )
    slow = around(PAPER, 4, "st")
    observations = [
        (tuple(new[r] for r in o.ranks), o.kind, o.slow) for o in observed(PAPER, slow, "st")
    ]
    assert named(localize(renamed, observations)) == {("machine", new[4], "host-4")}


@few
@given(st.lists(st.integers(0, CLUSTER.world_size - 1), min_size=2, max_size=2), st.data())
def test_two_separate_faults_give_two_diagnoses(ranks: list[int], data: st.DataObject) -> None:
    hosts = {CLUSTER.hosts[rank] for rank in ranks}
    kinds = data.draw(st.sampled_from(["dsp", "dspt"]))
    slow = set.union(*(around(CLUSTER, rank, kinds) for rank in ranks))
    diagnosis = localize(CLUSTER, observed(CLUSTER, slow, "dspt"))
    if len(hosts) == 2:
        assert named(diagnosis) == {("machine", rank, CLUSTER.hosts[rank]) for rank in ranks}
    assert {finding.host for finding in diagnosis.findings} <= {*hosts, ""}


def test_two_faulty_ranks_in_one_plane_are_known_by_their_hosts() -> None:
    """Slow TP and FSDP groups form a rectangle: 4 or 12 with 5 or 13 explain them alike."""
    topology = Topology.from_degrees(s=4, t=2, d=2, order="dst", hosts=2)
    slow = around(topology, 0, "st") | around(topology, 5, "st")
    diagnosis = localize(topology, observed(topology, slow, "st"))
    assert named(diagnosis) == {("machine", None, "host-0"), ("machine", None, "host-2")}


def test_two_slow_ranks_on_one_host_are_that_host() -> None:
    slow = around(CLUSTER, 8, "ds") | around(CLUSTER, 10, "ds")
    (finding,) = localize(CLUSTER, observed(CLUSTER, slow, "dspt")).findings
    assert (finding.conclusion, finding.rank, finding.host) == ("machine", None, "host-2")
    assert finding.suspects == (8, 10)


def test_a_slow_nic_of_a_host_is_that_host() -> None:
    slow = set.union(*(around(CLUSTER, rank, "dsp") for rank in range(20, 24)))
    diagnosis = localize(CLUSTER, observed(CLUSTER, slow, "dspt"))
    assert named(diagnosis) == {("machine", None, "host-5")}


def test_slow_groups_of_different_ranks_that_share_only_a_host_name_the_host() -> None:
    topology = Topology.from_degrees(d=4, s=4, order="ds", hosts=2)
    slow = {(0, 1, 2, 3), (1, 5, 9, 13)}
    assert named(localize(topology, observed(topology, slow, "ds"))) == {("machine", 1, "host-0")}
    slow = {(0, 4, 8, 12), (4, 5, 6, 7), (1, 5, 9, 13)}
    diagnosis = localize(topology, observed(topology, slow, "ds"))
    assert {f.host for f in diagnosis.findings} == {"host-2"}


def test_a_network_fault_between_the_same_hosts_names_neither() -> None:
    topology = Topology.from_degrees(s=2, t=4, order="st", hosts=4)
    diagnosis = localize(topology, observed(topology, set(topology.axis_groups("s")), "st"))
    assert named(diagnosis) == {("network", None, "")}


def test_a_compute_straggler_makes_its_groups_late_and_is_no_network_fault() -> None:
    observations = observed(PAPER, {(4, 5), (4, 12)}, "st")
    diagnosis = localize(PAPER, observations, compute_stragglers={4})
    assert diagnosis.healthy
    assert {entry.observation.ranks for entry in diagnosis.ignored} == {(4, 5), (4, 12)}


def test_a_compute_straggler_hides_no_other_fault() -> None:
    observations = observed(PAPER, {(4, 5), (4, 12), (6, 7), (7, 15)}, "st")
    diagnosis = localize(PAPER, observations, compute_stragglers=[4])
    assert named(diagnosis) == {("machine", 7, "host-7")}


@pytest.mark.parametrize("ranks", [(4,), (4, 5)])
def test_a_group_in_which_a_member_did_not_report_is_ignored(ranks: tuple[int, ...]) -> None:
    slow = len(ranks) < 2 or None
    diagnosis = localize(PAPER, [(ranks, "fsdp", slow), ((4, 12), "tp", True)])
    assert named(diagnosis) == {("link", None, "host-4")}
    assert diagnosis.ignored[0].why.startswith("a member did not report")


def test_part_of_an_axis_group_is_a_group_with_a_missing_member() -> None:
    diagnosis = localize(PAPER, [((0, 2, 4), "d", True), ((1, 3, 5, 7), "d", False)])
    assert diagnosis.healthy
    assert [entry.observation.ranks for entry in diagnosis.ignored] == [(0, 2, 4)]


def test_groups_of_the_same_members_are_not_independent() -> None:
    topology = Topology.from_degrees(s=2, t=1, c=1, d=3, order="ds", hosts=1)
    once = localize(topology, [((0, 1), "s", True)])
    twice = localize(topology, [((0, 1), "s", True), ((1, 0), "e", True), ((0, 1), "fsdp", True)])
    assert named(once) == named(twice) == {("network", None, "")}


def test_a_group_observed_both_slow_and_not_slow_is_ignored() -> None:
    states = [True, False, True]
    diagnosis = localize(PAPER, [((4, 5), "s", slow) for slow in states])
    assert diagnosis.healthy
    assert diagnosis.ignored


def test_a_healthy_overlapping_group_of_the_same_kind_exonerates() -> None:
    topology = Topology.from_degrees(p=4, t=2, order="pt", hosts=2)
    pipeline = [((0, 2), "p", False), ((2, 4), "p", True), ((4, 6), "p", True)]
    assert named(localize(topology, pipeline)) == {("machine", 4, "host-2")}
    tensor = [((2, 3), "t", True), ((0, 1), "t", False)]
    cleared = localize(topology, [*pipeline[:2], *tensor])
    assert 2 not in {finding.rank for finding in cleared.findings}


def test_a_lightly_loaded_healthy_group_of_another_kind_is_no_veto() -> None:
    observations = observed(PAPER, {(4, 5), (4, 12)}, "dst")
    (finding,) = localize(PAPER, observations).findings
    assert finding.rank == 4
    assert [(o.ranks, o.kind) for o in finding.contradicting] == [((0, 2, 4, 6), "d")]


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ({(4, 5), (4, 12)}, ("machine", 4, "")),
        ({(4, 12)}, ("link", None, "")),
        ({(4, 5)}, ("network", None, "")),
        ({(0, 8), (2, 3), (4, 12), (14, 15)}, ("cluster", None, "")),
    ],
)
def test_without_host_names_the_four_conclusions_stay_and_carry_no_host(
    slow: set[tuple[int, ...]], expected: tuple[str, int | None, str]
) -> None:
    observations = observed(PAPER_WITHOUT_HOSTS, slow, "st")
    assert named(localize(PAPER_WITHOUT_HOSTS, observations)) == {expected}


def test_only_the_slow_groups_need_to_be_given() -> None:
    assert named(localize(PAPER, [((4, 5), "fsdp", True), ((4, 12), "tp", True)])) == {
        ("machine", 4, "host-4")
    }


def test_a_single_machine_on_which_everything_is_slow_is_not_accused() -> None:
    topology = Topology.from_degrees(d=2, t=2, hosts=4)
    everything = set(topology.axis_groups("d") + topology.axis_groups("t"))
    diagnosis = localize(topology, observed(topology, everything, "dt"))
    assert named(diagnosis) == {("cluster", None, "")}


def test_two_machines_on_which_everything_is_slow_are_not_accused() -> None:
    topology = Topology.from_degrees(s=4, t=2, order="st", hosts=4)
    everything = set(topology.axis_groups("s") + topology.axis_groups("t"))
    diagnosis = localize(topology, observed(topology, everything, "st"))
    assert named(diagnosis) == {("cluster", None, "")}


@few
@given(seeds)
def test_no_rank_is_named_that_is_not_in_two_slow_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [o._replace(slow=bool(rng.random() < 0.15)) for o in observed(CLUSTER, set(), "dspt")]
    for finding in localize(CLUSTER, groups).findings:
        if finding.rank is not None:
            assert sum(o.slow and finding.rank in o.ranks for o in groups) >= 2
        if finding.conclusion in ("network", "cluster"):
            assert not finding.host


def test_expert_groups_are_found_in_the_expert_layout() -> None:
    dense = [(d, 0, t, 0, 0, 0) for d, t in itertools.product(range(4), range(2))]
    expert = [(d, 0, 0, 0, 0, e) for d, e in itertools.product(range(2), range(4))]
    topology = Topology.from_coordinates(dense, expert, [f"h{r // 2}" for r in range(8)])
    groups = [((0, 1, 2, 3), "e", True), ((4, 5, 6, 7), "e", False), ((0, 1), "t", True)]
    groups += [((2, 3), "t", False), ((0, 1, 2), "e", True)]
    diagnosis = localize(topology, groups)
    assert {f.host for f in diagnosis.findings} == {"h0"}
    assert [entry.observation.ranks for entry in diagnosis.ignored] == [(0, 1, 2)]


def test_real_resource_names_come_from_the_callers_map() -> None:
    names: dict[int | str, str] = {4: "GPU-7c1e", "host-6": "nvlink switch 3"}
    observations = observed(PAPER, {(4, 5), (4, 12), (6, 14)}, "st")
    findings = localize(PAPER, observations, resources=names).findings
    assert {(f.conclusion, f.resource) for f in findings} == {
        ("machine", "GPU-7c1e"),
        ("link", "nvlink switch 3"),
    }


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (((0, 1), "nvlink", True), "has kind 'nvlink'; known kinds are d, s"),
        (((), "tp", True), "has no ranks"),
        (((0, 16), "tp", True), r"one of the ranks 0\.\.15"),
        (((-1, 3), "tp", True), r"one of the ranks 0\.\.15"),
        (((3, 3), "tp", True), "once"),
    ],
)
def test_a_bad_observation_is_refused(observation: tuple[object, ...], message: str) -> None:
    with pytest.raises(ScoutError, match=message):
        localize(PAPER, [observation])  # type: ignore[list-item]


def test_two_faults_among_16384_ranks_are_both_named_from_their_timings() -> None:
    job = scale.Job()
    outcome = scale.run(job, seed=20)
    assert (len(job.groups), outcome.right, outcome.false) == (8448, True, 0)
