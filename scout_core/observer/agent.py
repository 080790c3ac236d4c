"""The agent: one process per node that watches its trainers from outside and outlives none of them.

Started as `python -m scout_core.observer.agent N` by a trainer, which writes two lines of JSON to
its standard input (`plan.Start`, then `plan.Plan`) and reads one line from the descriptor N.
Imports neither torch nor pydantic. One loop and no threads; every wait ends at the next heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import zmq

from scout_core.decision.snapshots import ProcessState, RankSnapshot
from scout_core.errors import ScoutError
from scout_core.observer.describe import snapshot_of
from scout_core.observer.member import Examination, Member
from scout_core.observer.plan import Plan, Start
from scout_core.observer.reach import reachable
from scout_core.observer.wire import HubSocket, Keys, Link, Message, new_keys, pack

if TYPE_CHECKING:
    from scout_core.observer.hub import Hub

PLAN_TIMEOUT_S: Final = 120.0
"""The second line comes when all nodes have started."""
FAREWELL_S: Final = 0.5
"""Time for the last messages to arrive."""
LINGER_S: Final = 4.0
"""After the last trainer has ended, for verdicts that are still being made."""
EXAMINING_S: Final = 0.02
"""Pace while trainers are examined."""
MAX_PACE_S: Final = 0.25
LOOKS_PER_LIMIT: Final = 20
"""How often a trainer is looked at within its shortest limit."""


@dataclass
class Answer:
    """What one hub is told about the trainers of this node."""

    link: Link
    number: int
    open: list[Examination]
    closed: dict[int, Examination] = field(default_factory=dict)


@dataclass
class Trainers:
    """The trainers of a node: those that can be watched, and what is known of the others."""

    members: list[Member]
    absent: list[RankSnapshot]


class Agent:
    """Watches, answers, raises alarms; carries a hub on the first nodes."""

    def __init__(
        self, start: Start, plan: Plan, trainers: Trainers, socket: HubSocket | None, keys: Keys
    ) -> None:
        self._start = start
        self._plan = plan
        self._members = trainers.members
        self._absent = trainers.absent
        self._socket = socket
        self._keys = keys
        self._hub: Hub | None = None
        self._status_file: str = ""
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._links = [
            Link(
                self._context,
                hub.endpoint,
                hub.public_key,
                name=str(plan.index),
                keys=keys,
                beat_s=plan.beat_s,
            )
            for hub in plan.hubs
        ]
        self._answers: list[Answer] = []
        self._late: set[int] = set()
        self._died: set[int] = set()
        self._beat_s = 0.0
        self._gone_s: float | None = None
        self._poller = zmq.Poller()
        for link in self._links:
            self._poller.register(link.socket, zmq.POLLIN)
        for member in self._members:
            self._poller.register(member.pidfd, zmq.POLLIN)
        if socket is not None:
            self._open_hub(socket)

    def run(self) -> None:
        """Watch until the job is over."""
        pace_s = min(MAX_PACE_S, self._start.limits.shortest_s / LOOKS_PER_LIMIT)
        while not self._is_over(time.monotonic()):
            self._poller.poll(int(1000 * (EXAMINING_S if self._answers else pace_s)))
            now_s = time.monotonic()
            self._watch(now_s)
            self._hear(now_s)
            self._examine()
            if self._hub is not None:
                self._hub.advance(now_s)
        with contextlib.suppress(FileNotFoundError):
            if self._status_file:
                os.unlink(self._status_file)
        self._context.destroy(linger=int(1000 * FAREWELL_S))

    def _open_hub(self, socket: HubSocket) -> None:
        # Only hubs judge, and the verdict needs numpy: 0.1 s and 10 MB that other agents save.
        from scout_core.observer.hub import Hub
        from scout_core.observer.reporter import Reporter
        from scout_core.report.events import RunDir

        visitor = new_keys()  # the identity of `scout status`
        socket.allow([*self._plan.agent_keys, visitor.public])
        for each in socket.sockets:
            self._poller.register(each, zmq.POLLIN)
        run_dir = RunDir(self._start.run_dir)
        reporter = Reporter(run_dir, self._plan.topology, self._plan.job)
        self._hub = Hub(self._plan, socket, reporter, reachable, time.monotonic())
        address = next(hub for hub in self._plan.hubs if hub.node == self._plan.index)
        self._status_file = str(run_dir.path / f"observer-{self._plan.index}.json")
        text = json.dumps({**address.__dict__, "visitor": visitor._asdict(), "pid": os.getpid()})
        descriptor = os.open(self._status_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)

    def _watch(self, now_s: float) -> None:
        for member in self._members:
            was_there = not member.ended
            member.observe(now_s)
            if member.ended and was_there:
                self._poller.unregister(member.pidfd)
        late = {m.rank for m in self._members if m.is_late(now_s, self._start.limits)}
        died = {m.rank for m in self._members if m.died}
        died |= {s.rank for s in self._absent if s.state is ProcessState.DEAD}
        resumed = {m.rank for m in self._members if m.rank in self._late - late and not m.ended}
        changed = (late, died) != (self._late, self._died)
        self._late, self._died = late, died
        if changed or now_s - self._beat_s >= self._plan.beat_s:
            self._beat_s = now_s
            self._tell_hubs(self._state(resumed))
        if self._gone_s is None and all(m.ended or m.finished for m in self._members):
            self._gone_s = now_s
            self._tell_hubs({"t": "bye", "snapshots": self._packed({})})

    def _state(self, resumed: set[int]) -> Message:
        """A heartbeat that carries the alarm, so that a hub that starts again learns of it."""
        if not (self._late or self._died or resumed):
            return {"t": "beat"}
        sets = {"late": self._late, "died": self._died, "resumed": resumed}
        return {"t": "alarm", **{name: sorted(ranks) for name, ranks in sets.items()}}

    def _tell_hubs(self, message: Message) -> None:
        for link in self._links:
            link.send(message)

    def _hear(self, now_s: float) -> None:
        try:
            for place, link in enumerate(self._links):
                for message in link.receive():
                    self._on_message(link, place, message, now_s)
            if self._socket is not None and self._hub is not None:
                for sender, message in self._socket.receive():
                    self._hub.receive(sender, message, now_s)
        except ScoutError as error:  # a peer of another version: say it, go on
            print(f"scout observer: {error}", file=sys.stderr, flush=True)

    def _on_message(self, link: Link, place: int, message: Message, now_s: float) -> None:
        if place == 0 and self._hub is not None:
            self._hub.hear_first_hub(now_s)
        if message["t"] == "collect":
            asked = [m for m in self._members if message["examine"] and not self._is_gone(m)]
            examinations = [Examination(member) for member in asked]
            self._answers.append(Answer(link, message["round"], examinations))
        elif message["t"] == "say":
            for member in self._members:
                if member.rank == message["rank"]:
                    member.send({"say": message["text"]})

    def _examine(self) -> None:
        for answer in list(self._answers):
            for examination in list(answer.open):
                if examination.advance():
                    answer.open.remove(examination)
                    answer.closed[examination.member.rank] = examination
                    examination.member.note_stack(examination.stack)
            if not answer.open:
                self._answers.remove(answer)
                self._send(answer)

    def _send(self, answer: Answer) -> None:
        answered = [rank for rank, examination in answer.closed.items() if examination.answered]
        message = {"round": answer.number, "answered": answered, "traces": self._traces(answer)}
        snapshots = self._packed(answer.closed)
        answer.link.send({"t": "snapshots", **message, "snapshots": snapshots})

    def _traces(self, answer: Answer) -> dict[int, Any]:
        sockets = {rank: e.member.contact.trace_socket for rank, e in answer.closed.items()}
        if not any(sockets.values()):
            return {}
        from scout_core.observer.second_source import trace_of  # rarely needed

        return {rank: trace_of(path) for rank, path in sockets.items() if path}

    def _packed(self, examinations: Mapping[int, Examination]) -> list[Message]:
        limits, host = self._start.limits, self._start.host
        found = [
            snapshot_of(member, examinations.get(member.rank), limits, host=host)
            for member in self._members
        ]
        return [pack(snapshot) for snapshot in (*found, *self._absent)]

    def _is_gone(self, member: Member) -> bool:
        return member.ended or member.finished

    def _is_over(self, now_s: float) -> bool:
        """The job is over when no node has trainers and no verdict is being made."""
        if self._gone_s is None or now_s - self._gone_s < FAREWELL_S:
            return False
        if self._hub is None:
            return True
        busy = self._hub.busy and now_s - self._gone_s < LINGER_S
        return not busy and not self._hub.others_train(now_s)


def main() -> None:
    """Run an agent; see the module."""
    start = Start.from_json(json.loads(sys.stdin.buffer.readline()))
    trainers = _find(start)
    keys = Keys(start.public_key, start.secret_key) if start.public_key else new_keys()
    socket = HubSocket(zmq.Context.instance(), keys, start.beat_s) if start.hub else None
    port = 0 if socket is None else socket.bind(start.address, start.port)
    with open(int(sys.argv[1]), "w") as pipe:
        pipe.write(json.dumps({**keys._asdict(), "port": port}) + "\n")
    if not select.select([sys.stdin], [], [], PLAN_TIMEOUT_S)[0]:
        sys.exit("scout observer: no plan came")
    line = sys.stdin.buffer.readline()
    if line and trainers.members:
        Agent(start, Plan.from_json(json.loads(line)), trainers, socket, keys).run()


def _find(start: Start) -> Trainers:
    found = Trainers([], [])
    for contact in start.contacts:
        try:
            found.members.append(Member(contact))
        except ProcessLookupError:  # it died while no agent was there
            state = ProcessState.DEAD
            found.absent.append(RankSnapshot(contact.rank, host=start.host, state=state))
        except (OSError, ScoutError) as error:
            why = f"it cannot be watched: {error}"
            found.absent.append(RankSnapshot(contact.rank, host=start.host, missing=why))
    return found


if __name__ == "__main__":
    main()
