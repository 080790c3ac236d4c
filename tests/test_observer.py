"""The observer's parts: messages, the hub's decisions over time, trainers asked and described."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq
from hypothesis import given
from hypothesis import strategies as st

from scout_core.config import HangConfig
from scout_core.decision.consensus import Status
from scout_core.decision.evidence import Progress
from scout_core.decision.snapshots import (
    GroupState,
    Operation,
    OperationState,
    Phase,
    ProcessState,
    RankSnapshot,
)
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence import collectives
from scout_core.evidence.progress import INTERNAL, Publisher
from scout_core.evidence.ring import CLOSED, FAILED
from scout_core.integration.hang_watch import HangWatch, limits_of
from scout_core.integration.responder import Responder
from scout_core.observer.contact import Contact
from scout_core.observer.describe import snapshot_of
from scout_core.observer.hub import DEATH_GRACE_S, ROUND_S, SILENT_BEATS, Hub
from scout_core.observer.limits import Limits, phase_named
from scout_core.observer.member import Examination, Member, _signal_thread
from scout_core.observer.plan import HubAddress, Node, Plan, Start
from scout_core.observer.reach import reachable
from scout_core.observer.reporter import TOGETHER_S, Reporter
from scout_core.observer.wire import (
    HubSocket,
    Keys,
    Link,
    Message,
    endpoint_of,
    new_keys,
    pack,
    unpack,
)
from scout_core.report.events import RunDir

LIMITS = Limits(step_s=1.0, initialize_s=9.0, data_s=2.0, evaluation_s=5.0, checkpoint_s=7.0)
DEADLINE_S = 20.0


def eventually(look: Callable[[], Any]) -> Any:
    """Return the first truthy value, or the last one at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


# Messages


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Line:
    """A hub and agents that connect to it."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.context = context
        self.keys = new_keys()
        self.hub = HubSocket(context, self.keys, 1.0)
        self.port = self.hub.bind("127.0.0.1", 0)
        self.links: list[Link] = []

    def connect(self, name: str, keys: Keys) -> Link:
        endpoint = f"tcp://127.0.0.1:{self.port}"
        link = Link(self.context, endpoint, self.keys.public, name=name, keys=keys, beat_s=1.0)
        self.links.append(link)
        return link


@pytest.fixture
def line(context: zmq.Context[Any]) -> Iterator[Line]:
    made = Line(context)
    yield made
    for each in (made.hub, *made.links):
        each.close()


def test_a_known_agent_is_heard_and_answered(line: Line) -> None:
    keys = new_keys()
    link = line.connect("5", keys)
    line.hub.allow([keys.public])
    link.send({"t": "beat"})
    assert eventually(lambda: list(line.hub.receive())) == [("5", {"t": "beat"})]
    line.hub.send("5", {"t": "collect", "round": 1})
    line.hub.send("nobody", {"t": "beat"})
    assert eventually(lambda: list(link.receive())) == [{"t": "collect", "round": 1}]


def test_a_stranger_is_not_let_in(line: Line) -> None:
    friend = new_keys()
    line.hub.allow([friend.public])
    line.connect("6", new_keys()).send({"t": "alarm"})
    line.connect("5", friend).send({"t": "beat"})
    heard: list[tuple[str, Message]] = []
    eventually(lambda: heard.extend(line.hub.receive()) or heard)
    time.sleep(0.1)
    assert [*heard, *line.hub.receive()] == [("5", {"t": "beat"})]


def test_what_is_no_message_is_refused_with_the_rule(line: Line) -> None:
    keys = new_keys()
    line.hub.allow([keys.public])
    line.connect("5", keys).socket.send(b"[1, 2")
    assert eventually(lambda: line.hub._open_the_gate() or line.hub.socket.poll(50))
    with pytest.raises(ScoutError, match="one version of SCOUT"):
        list(line.hub.receive())


OPERATIONS = st.builds(
    Operation,
    sequence=st.integers(1, 99),
    name=st.sampled_from(["all_reduce", "send"]),
    arguments=st.text(max_size=9),
    state=st.sampled_from(OperationState),
)
GROUPS = st.builds(
    GroupState,
    name=st.text(max_size=5),
    ranks=st.lists(st.integers(0, 99), max_size=9).map(tuple),
    enqueued=st.integers(0, 99) | st.none(),
    operations=st.lists(OPERATIONS, max_size=3).map(tuple),
)
SNAPSHOTS = st.builds(
    RankSnapshot,
    rank=st.integers(0, 99),
    host=st.text(max_size=5),
    state=st.sampled_from(ProcessState),
    phase=st.sampled_from(Phase),
    progress=st.builds(Progress, st.integers(0, 9), st.integers(0, 9)) | st.none(),
    groups=st.lists(GROUPS, max_size=3).map(tuple),
)


@given(SNAPSHOTS)
def test_a_snapshot_survives_the_wire(snapshot: RankSnapshot) -> None:
    assert unpack(pack(snapshot)) == snapshot


@pytest.mark.parametrize(
    ("address", "port", "expected"),
    [("10.0.0.1", 5, "tcp://10.0.0.1:5"), ("::1", 5, "tcp://[::1]:5"), ("::1", 0, "tcp://[::1]")],
)
def test_addresses_of_both_families_make_endpoints(address: str, port: int, expected: str) -> None:
    assert endpoint_of(address, port) == expected


def test_equal_members_of_groups_are_one_object_after_the_wire() -> None:
    world = tuple(range(1000))
    group = GroupState("dp", world, 1)
    first, second = (unpack(pack(RankSnapshot(r, groups=(group,)))) for r in (0, 1))
    assert first.groups[0].ranks is second.groups[0].ranks


def test_a_message_that_is_no_snapshot_is_refused() -> None:
    with pytest.raises(ScoutError):
        unpack({"snapshot": {"schema": "other"}, "members": []})
    with pytest.raises(ScoutError, match="members of 1 groups"):
        unpack({**pack(RankSnapshot(0, groups=(GroupState("g", (0,), 1),))), "members": []})


@pytest.mark.parametrize("topology", [None, Topology.from_degrees(d=2, t=2, hosts=2)])
def test_a_plan_survives_its_way_to_the_agent(topology: Topology | None) -> None:
    nodes = (Node(0, "a", "10.0.0.1", (0, 2)), Node(1, "b", "", (1, 3)))
    plan = Plan(1, 0.5, (HubAddress(0, "tcp://x:1", "key"),), nodes, ("k",), "job", topology)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    start = Start(1, "b", "127.0.0.1", "/run", (contact_of(3, 1),), LIMITS, 0.5, True)
    assert Start.from_json(json.loads(json.dumps(start.to_json()))) == start


def contact_of(rank: int, pid: int) -> Contact:
    return Contact(rank, pid, 3, 4, 5, pid, 1234, pid, internal=("/x/",), device="cpu")


def test_limits_follow_the_phase() -> None:
    assert [LIMITS.of(p) for p in (Phase.UNKNOWN, Phase.BACKWARD, Phase.DATA)] == [1.0, 1.0, 2.0]
    assert LIMITS.of(Phase.IDLE) == math.inf
    assert phase_named("somebody's own") is Phase.UNKNOWN
    config = HangConfig(stall_timeout_s=3.0, data_timeout_s=None)
    assert limits_of(config).data_s == limits_of(config).step_s == 3.0
    assert limits_of(HangConfig(data_timeout_s=8.0)).data_s == 8.0


def test_a_machine_that_accepts_or_refuses_is_alive_and_one_that_is_mute_is_not() -> None:
    with contextlib.ExitStack() as stack:
        mute = stack.enter_context(socket.socket())
        mute.bind(("127.0.0.1", 0))
        mute.listen(0)
        for _ in range(3):  # its queue is full: the kernel drops what comes next
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(mute.getsockname())
        taken = mute.getsockname()[1]
        assert reachable(["127.0.0.1"], ports=[taken], timeout_s=0.1) == set()
        assert reachable(["127.0.0.1"], ports=[taken, 1], timeout_s=5) == {"127.0.0.1"}
    assert reachable(["127.0.0.1"], ports=[taken], timeout_s=5) == {"127.0.0.1"}
    assert reachable([]) == set()


# The hub, with a time of its own


class Agents:
    """Keeps what a hub sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, name: str, message: Message) -> None:
        if message["t"] != "beat":
            self.sent.append((name, message))


class World:
    """A hub of a job of two nodes with two ranks each, and its time."""

    def __init__(self, folder: pathlib.Path, index: int = 0, alive: Collection[str] = ()) -> None:
        self.run_dir = RunDir(folder)
        self.agents = Agents()
        nodes = (Node(0, "left", "10.0.0.1", (0, 1)), Node(1, "right", "10.0.0.2", (2, 3)))
        hubs = (HubAddress(0, "", ""), HubAddress(1, "", ""))
        plan = Plan(index, 1.0, hubs, nodes)
        self.now_s = 100.0
        self.asked: list[Collection[str]] = []

        def probe(addresses: Collection[str]) -> set[str]:
            self.asked.append(addresses)
            return set(alive)

        reporter = Reporter(self.run_dir, None, "job")
        self.hub = Hub(plan, self.agents, reporter, probe, self.now_s)

    def hear(self, node: int, message: Message) -> None:
        self.hub.receive(str(node), message, self.now_s)

    def alarm(
        self, node: int, late: Sequence[int], died: Sequence[int] = (), resumed: Sequence[int] = ()
    ) -> None:
        self.hear(node, {"t": "alarm", "late": late, "died": died, "resumed": resumed})

    def answer(self, node: int, *snapshots: RankSnapshot) -> None:
        last = [m["round"] for name, m in self.agents.sent if name == str(node) and "round" in m]
        ranks = [s.rank for s in snapshots if s.state is ProcessState.ALIVE]
        packed = [pack(snapshot) for snapshot in snapshots]
        message = {"t": "snapshots", "round": last[-1], "answered": ranks, "traces": {}}
        self.hear(node, {**message, "snapshots": packed})

    def after(self, seconds: float, heard: Collection[int] = (0, 1)) -> None:
        """Let time pass in small steps; these nodes send heartbeats."""
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s = min(end, self.now_s + 0.05)
            for node in heard:
                self.hear(node, {"t": "beat"})
            self.hub.advance(self.now_s)

    @property
    def rounds(self) -> int:
        return len({m["round"] for _, m in self.agents.sent if m["t"] == "collect"})

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in self.run_dir.events()]


def waiting(rank: int, *, entered: int = 8, late: bool = True) -> RankSnapshot:
    """A rank in all-reduce number `entered`; number 7 is complete everywhere."""
    group = GroupState("0", (0, 1, 2, 3), entered, 7, operations=(Operation(8, "all_reduce"),))
    return RankSnapshot(
        rank,
        state=ProcessState.ALIVE,
        progress=Progress(3, 1),
        phase_age_s=2.0,
        within_limit=not late,
        groups=(group if entered == 8 else replace(group, operations=()),),
    )


@pytest.fixture
def world(tmp_path: pathlib.Path) -> World:
    return World(tmp_path)


def test_a_quiet_job_is_asked_nothing(world: World) -> None:
    world.after(30)
    assert world.agents.sent == []
    assert world.asked == []
    assert not world.hub.busy


def test_an_alarm_asks_all_nodes_and_reports_once(world: World) -> None:
    world.alarm(0, [0, 1])
    world.after(0.1)
    assert [name for name, message in world.agents.sent] == ["0", "1"]
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7))
    world.after(0.1)
    assert [i.culprit_ranks for i in world.run_dir.incidents()] == [(3,)]
    assert world.agents.sent[-1][1]["t"] == "say"
    assert world.agents.sent[-1][1]["rank"] == 0
    world.after(60)
    assert len(world.run_dir.incidents()) == 1
    assert 3 <= world.rounds <= 7  # it looks again, ever less often


def test_ranks_within_their_limit_are_not_accused_until_it_is_over(world: World) -> None:
    world.alarm(0, [0, 1])
    world.after(0.1)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7, late=False))
    world.after(0.1)
    assert world.run_dir.incidents() == []
    world.alarm(1, [3])
    world.after(0.1)
    assert world.rounds == 2
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7))
    world.after(0.1)
    assert [i.culprit_ranks for i in world.run_dir.incidents()] == [(3,)]


def test_a_job_that_moves_again_is_no_group_stall(world: World) -> None:
    world.alarm(0, [0])
    world.after(0.1)
    world.answer(0, waiting(0, late=False), waiting(1, late=False))
    world.answer(1, waiting(2, late=False), waiting(3, late=False))
    world.after(0.1)
    assert world.run_dir.incidents() == []


def test_an_alarm_that_is_taken_back_ends_the_questions(world: World) -> None:
    world.alarm(0, [0])
    world.after(0.1)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7))
    world.after(0.1)
    world.alarm(0, [], resumed=[0])
    world.after(60)
    assert world.rounds == 1
    assert world.events == ["incident_cleared"]
    assert not world.hub.busy


def test_a_hang_after_one_that_was_withdrawn_is_a_new_incident(world: World) -> None:
    for _ in range(2):
        world.alarm(0, [0])
        world.after(0.1)
        world.answer(0, waiting(0), waiting(1))
        world.answer(1, waiting(2), waiting(3, entered=7))
        world.after(0.1)
        world.alarm(0, [], resumed=[0])
        world.after(5)
    assert [i.culprit_ranks for i in world.run_dir.incidents()] == [(3,), (3,)]


def test_the_end_of_late_ranks_is_no_recovery(world: World) -> None:
    world.alarm(0, [0])
    world.after(0.1)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7))
    world.after(0.1)
    world.alarm(0, [], died=[0])
    world.after(0.1)
    assert world.events == []


def test_the_standby_keeps_quiet_while_the_first_hub_is_heard(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, index=1)
    world.alarm(0, [0])
    for _ in range(20):
        world.hub.hear_first_hub(world.now_s)
        world.after(0.5)
    assert world.rounds == 0
    world.after(SILENT_BEATS + 2.0, heard=[1])
    assert world.rounds == 1
    assert "observer_standby_leads" in world.events


@pytest.mark.parametrize("dead_machine", [True, False])
def test_a_silent_agent_is_told_from_a_dead_machine(
    tmp_path: pathlib.Path, dead_machine: bool
) -> None:
    world = World(tmp_path, alive=[] if dead_machine else ["10.0.0.2"])
    world.after(SILENT_BEATS + 1.0, heard=[0])
    world.alarm(0, [0, 1])
    world.after(0.1, heard=[0])
    world.answer(0, waiting(0), waiting(1))
    world.after(0.1, heard=[0])
    incident = world.run_dir.incidents()[0]
    assert world.asked == [{"10.0.0.2"}]
    assert world.events == ["observer_agent_silent"]
    if dead_machine:
        assert (incident.reason, incident.culprit_ranks) == ("NODE_UNREACHABLE", (2, 3))
    else:
        assert (incident.status, incident.culprits) == (Status.INCONCLUSIVE, ())


def test_a_node_that_does_not_answer_a_round_delays_it_by_its_deadline_only(world: World) -> None:
    world.alarm(0, [0])
    world.after(0.1)
    world.answer(0, waiting(0), waiting(1))
    world.after(ROUND_S)
    assert world.run_dir.incidents()[0].status is Status.INCONCLUSIVE
    world.answer(1, waiting(2), waiting(3, entered=7))  # too late: ignored
    assert len(world.run_dir.incidents()) == 1


def dead(rank: int, code: int | None, age_s: float = 0.1) -> RankSnapshot:
    return RankSnapshot(rank, state=ProcessState.DEAD, exit_code=code, state_age_s=age_s)


def test_a_death_is_reported_after_a_grace_with_the_ranks_that_died_of_it(world: World) -> None:
    world.alarm(1, [], died=[2])
    world.after(DEATH_GRACE_S / 2)
    assert world.rounds == 0
    world.after(DEATH_GRACE_S)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, dead(2, -9), waiting(3))
    world.after(0.1)
    incident = world.run_dir.incidents()[0]
    assert (incident.reason, incident.culprit_ranks) == ("PROCESS_DEAD", (2,))
    world.alarm(1, [], resumed=[3])
    assert world.events == []  # a dead process does not come back


def end_all(world: World, codes: list[int | None], lead_s: float = 0.3) -> None:
    """End all ranks, rank 2 a while before the others."""
    ages = [0.2 + lead_s if rank == 2 else 0.2 for rank in range(4)]
    snapshots = [pack(dead(rank, codes[rank], ages[rank])) for rank in range(4)]
    for node in (0, 1):
        world.alarm(node, [], died=[2 * node, 2 * node + 1])
        world.hear(node, {"t": "bye", "snapshots": snapshots[2 * node : 2 * node + 2]})
    world.after(5, heard=[])


def test_a_job_that_was_told_to_end_is_no_fault(world: World) -> None:
    end_all(world, [-signal.SIGTERM] * 4)
    assert world.run_dir.incidents() == []
    assert world.events == ["job_terminated"]
    assert not world.hub.busy
    assert not world.hub.others_train(world.now_s)


@pytest.mark.parametrize("lead_s", [-0.3, 0.0, TOGETHER_S / 2])
def test_an_exit_code_that_was_lost_does_not_accuse_anybody_of_an_end_on_request(
    world: World, lead_s: float
) -> None:
    end_all(world, [-15, None, None, -15], lead_s)
    assert world.run_dir.incidents() == []
    assert world.events == ["job_terminated"]


@pytest.mark.parametrize("code", [None, -9])
def test_a_death_before_the_others_were_asked_to_end_is_named(
    world: World, code: int | None
) -> None:
    end_all(world, [-15, None, code, -15])
    assert [i.culprit_ranks for i in world.run_dir.incidents()] == [(2,)]


def test_a_launcher_that_ends_the_rest_does_not_hide_the_first_death(world: World) -> None:
    end_all(world, [-15, -15, 1, -15])
    assert [i.reason for i in world.run_dir.incidents()] == ["PROCESS_DEAD"]
    assert world.run_dir.incidents()[0].culprit_ranks == (2,)


def test_a_verdict_is_improved_only_when_it_names_somebody(world: World) -> None:
    world.alarm(0, [0])
    world.after(0.1)
    world.answer(0, waiting(0), waiting(1))
    world.after(ROUND_S)
    world.after(3)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7))
    world.after(0.1)
    statuses = [incident.status for incident in world.run_dir.incidents()]
    assert statuses == [Status.INCONCLUSIVE, Status.ATTRIBUTED]


def test_the_evidence_of_an_incident_is_kept_for_post_mortem(world: World) -> None:
    from scout_core.evidence.post_mortem import load

    world.alarm(0, [0])
    world.after(0.1)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3, entered=7))
    world.after(0.1)
    assert [s.rank for s in load(world.run_dir.path).snapshots] == [0, 1, 2, 3]


def test_status_is_answered_by_any_hub_without_examining_trainers(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, index=1)
    world.hub.receive("status-1", {"t": "status"}, world.now_s)
    assert all(message["examine"] is False for _, message in world.agents.sent)
    world.answer(0, waiting(0), waiting(1))
    world.answer(1, waiting(2), waiting(3))
    world.after(0.1)
    name, message = world.agents.sent[-1]
    assert (name, message["t"], message["incident"]) == ("status-1", "status", None)
    assert [row["pending"]["operation"] for row in message["ranks"]] == ["all_reduce"] * 4


# A trainer, asked from outside: this process plays it


class Trainer:
    """Ring, helper thread and contact of this process."""

    def __init__(self) -> None:
        self.publisher = Publisher(rank=3)
        self.ticks = 0
        self.failures: list[Exception] = []
        self.broken = False
        self.responder = Responder(threading.get_ident(), self._tick, self.failures.append)
        self.contact = Contact(
            rank=3,
            pid=os.getpid(),
            ring=self.publisher.ring.descriptor,
            requests=self.responder.requests,
            replies=self.responder.replies,
            training_thread=threading.get_native_id(),
            training_ident=threading.get_ident(),
            helper_thread=self.responder.thread_id,
            dump_signal=self.responder.dump_signal,
            internal=INTERNAL,
        )
        self.member = Member(self.contact)

    def _tick(self) -> None:
        if self.broken:
            raise KeyError("bug")
        self.ticks += 1

    def close(self) -> None:
        self.member.close()
        self.responder.close()
        self.publisher.ring.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.close()


def examined(trainer: Trainer) -> Examination:
    examination = Examination(trainer.member)
    assert eventually(examination.advance)
    return examination


def test_a_trainer_tells_its_stack_and_refreshes_its_completions(trainer: Trainer) -> None:
    examination = examined(trainer)
    assert examination.answered
    assert examination.refreshed
    assert any("test_a_trainer_tells_its_stack" in frame for frame in examination.stack)
    assert not examination.holds_gil


def test_a_bug_on_the_helper_thread_is_told_once_and_ends_it(trainer: Trainer) -> None:
    trainer.broken = True
    assert eventually(lambda: trainer.failures)
    assert [str(failure) for failure in trainer.failures] == ["'bug'"]


def test_two_examinations_at_once_do_not_take_each_others_answers(trainer: Trainer) -> None:
    pair = [Examination(trainer.member), Examination(trainer.member)]
    for examination in pair:
        assert eventually(examination.advance)
    assert [examination.answered for examination in pair] == [True, True]


def test_all_stacks_can_be_dumped_through_the_helper_without_the_gil(trainer: Trainer) -> None:
    contact = trainer.contact
    assert contact.dump_signal
    _signal_thread(contact.pid, contact.helper_thread, contact.dump_signal)
    name = "test_all_stacks_can_be_dumped"
    assert eventually(lambda: trainer.member.reply_to(0) or name in trainer.member.dump)


def test_progress_is_noticed_and_its_absence_is_late_by_the_phase(trainer: Trainer) -> None:
    member, publisher = trainer.member, trainer.publisher
    member.observe(100.0)
    publisher.end_step(1)
    member.observe(101.0)
    assert member.silent_s(101.9) == pytest.approx(0.9)
    assert [member.is_late(t, LIMITS) for t in (101.9, 102.1)] == [False, True]
    with publisher.during(Phase.DATA):
        member.observe(110.0)
        assert [member.is_late(t, LIMITS) for t in (111.9, 112.1)] == [False, True]
    with publisher.during(Phase.IDLE):
        member.observe(120.0)
        assert not member.is_late(1e9, LIMITS)


def test_a_trainer_that_compiles_has_the_time_of_initialisation(trainer: Trainer) -> None:
    trainer.publisher.end_step(1)
    trainer.member.observe(100.0)
    trainer.member.note_stack(["/x/torch/_inductor/codecache.py:1 load"])
    assert [trainer.member.is_late(t, LIMITS) for t in (108.0, 110.0)] == [False, True]
    trainer.publisher.boundary()
    trainer.member.observe(111.0)
    assert trainer.member.is_late(112.5, LIMITS)


@pytest.mark.parametrize(("state", "died"), [(CLOSED, False), (FAILED, True)])
def test_an_end_that_was_announced_is_known_at_once(
    trainer: Trainer, state: int, died: bool
) -> None:
    trainer.publisher.ring.end(state, "ValueError: nan" if died else "")
    assert (trainer.member.died, trainer.member.finished) == (died, not died)
    snapshot = snapshot_of(trainer.member, None, LIMITS, host="h")
    assert snapshot.state is (ProcessState.DEAD if died else ProcessState.ALIVE)
    assert (snapshot.error, snapshot.phase is Phase.FINISHED) == (
        "ValueError: nan" if died else "",
        not died,
    )


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_snapshot_holds_groups_channels_and_where_it_is(trainer: Trainer, alone: None) -> None:
    remove = collectives.observe(trainer.publisher)
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
    examination = examined(trainer)
    remove()
    snapshot = snapshot_of(trainer.member, examination, LIMITS, host="h")
    group = snapshot.groups[0]
    assert (group.name, group.ranks, group.enqueued, group.completed) == ("0", (0,), 1, 1)
    assert group.operations[0].arguments == "float32 max numel 4"
    assert group.operations[0].state is OperationState.COMPLETED
    assert __file__ in group.operations[0].call_site
    assert snapshot.where
    assert (snapshot.rank, snapshot.host, snapshot.state) == (3, "h", ProcessState.ALIVE)


def test_what_was_pending_when_nobody_could_be_asked_is_unknown_not_incomplete(
    trainer: Trainer, alone: None
) -> None:
    remove = collectives.observe(trainer.publisher)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    snapshot = snapshot_of(trainer.member, None, LIMITS, host="h")
    assert (snapshot.groups[0].enqueued, snapshot.groups[0].completed) == (1, None)
    assert work is not None
    work.wait()
    remove()


def test_the_helper_gives_back_its_thread_signal_and_descriptors() -> None:
    def state() -> tuple[int, str, int]:
        gc.collect()
        caught = pathlib.Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0]
        return len(os.listdir("/proc/self/fd")), caught, threading.active_count()

    Trainer().close()  # whatever the first one loads for good
    before = state()
    Trainer().close()
    assert state() == before


def test_an_agent_needs_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, scout_core.observer.agent as agent, scout_core.observer.hub;"
        "print(sorted({'torch', 'pydantic'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (found.stdout.strip(), found.stderr) == ("[]", "")


# The watch of a trainer


def test_a_rank_that_does_not_come_costs_the_cover_and_not_the_job(tmp_path: pathlib.Path) -> None:
    hook = sys.excepthook
    watch = HangWatch.start(
        rank=0,
        world_size=2,
        run_dir=RunDir(tmp_path),
        config=HangConfig(),
        store=dist.HashStore(),
        timeout_s=0.2,
    )
    assert "contact/1" in watch.lost
    with watch.phase("checkpoint"):
        watch.step(1)
    watch.close()
    watch.close()
    assert [event["event"] for event in RunDir(tmp_path).events()] == ["hang_cover_lost"]
    assert sys.excepthook is hook


def test_a_lone_trainer_is_watched_to_its_end_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    watch = HangWatch.start(
        rank=0,
        world_size=1,
        run_dir=RunDir(tmp_path),
        config=HangConfig(stall_timeout_s=60),
        store=dist.HashStore(),
    )
    assert watch.lost == ""
    assert watch._agent is not None
    pid = watch._agent.pid
    with pytest.raises(ScoutError, match="phase 'lunch' does not exist"):
        watch.phase("lunch")
    watch.resume()
    watch.pause()
    watch.resume()
    watch.close()
    assert eventually(lambda: not pathlib.Path(f"/proc/{pid}").exists())
    assert RunDir(tmp_path).events() == []
    assert not [name for name in os.listdir("/dev/shm") if "ring" in name or "hang" in name]
