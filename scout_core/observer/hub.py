"""The hub: hears the alarms of all nodes, gathers snapshots, and has the verdict made.

The agents of the first two nodes carry a hub each; the second is the standby. Both hear everything,
and the standby acts only while the first one is silent, so nothing has to be handed over. A hub
never waits: it is told of messages and of the time, and each round of questions has a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from scout_core.decision.snapshots import ProcessState, RankSnapshot
from scout_core.observer.plan import Node, Plan
from scout_core.observer.reporter import Reporter, were_asked_to_end
from scout_core.observer.second_source import with_traces
from scout_core.observer.wire import Message, unpack

ROUND_S: Final = 1.2
"""A node that has not answered a round of questions by then counts as silent."""
DEATH_GRACE_S: Final = 0.4
"""After a death, others may be about to die of the same cause."""
TERMINATION_GRACE_S: Final = 1.5
"""The same when a signal asked the process to end: the whole job may have been told to."""
SILENT_BEATS: Final = 4
"""Heartbeats that may be missed."""
RECHECK_S: Final = 2.0
"""A job that stays silent is looked at again after this time, then ever less often."""
RECHECK_MAX_S: Final = 30.0

Reachable = Callable[[Collection[str]], set[str]]
"""Tells which of some addresses belong to a machine that answers at all."""


class Outlet(Protocol):
    """How a hub reaches the agents."""

    def send(self, name: str, message: Message) -> None:
        """Send to one peer; never waits."""


@dataclass
class Round:
    """One gathering of snapshots."""

    number: int
    expected: set[int]
    """Nodes that have not answered."""
    deadline_s: float
    reply_to: str = ""
    """Who asked for the state of the job; empty when the hub itself wants a verdict."""
    snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    traces: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Flight Recorder of ranks whose operations SCOUT does not see."""
    answered: set[int] = field(default_factory=set)
    """Ranks whose interpreter answered, so that they can print."""


@dataclass
class NodeState:
    """What the hub knows of a node."""

    heard_s: float
    late: frozenset[int] = frozenset()
    died: frozenset[int] = frozenset()
    final: list[RankSnapshot] | None = None
    """What its trainers looked like when they had all ended; None while some have not."""
    left_s: float = 0.0

    def final_now(self, now_s: float) -> dict[int, RankSnapshot]:
        """Return the final snapshots, grown older."""
        grown_s = now_s - self.left_s
        return {
            s.rank: s if s.state_age_s is None else replace(s, state_age_s=s.state_age_s + grown_s)
            for s in self.final or ()
        }


class Hub:
    """Rounds of questions, and when to ask. Times are seconds of one monotonic clock."""

    def __init__(
        self, plan: Plan, outlet: Outlet, reporter: Reporter, reachable: Reachable, now_s: float
    ) -> None:
        """Start listening; every node is given time to be heard for the first time."""
        self._plan = plan
        self._outlet = outlet
        self._reporter = reporter
        self._reachable = reachable
        self._nodes = {node.index: NodeState(now_s) for node in plan.nodes}
        self._silence_s = SILENT_BEATS * plan.beat_s
        self._rounds: dict[int, Round] = {}
        self._numbers = 0
        self._due_s = math.inf
        self._recheck_s = RECHECK_S
        self._first_hub_s = now_s
        self._beat_s = -math.inf

    @property
    def busy(self) -> bool:
        """There is something to find out."""
        return bool(self._rounds) or self._due_s < math.inf

    def others_train(self, now_s: float) -> bool:
        """Tell whether some other node still has trainers."""
        others = (index for index in self._nodes if index != self._plan.index)
        return any(self._is_heard(index, now_s) for index in others)

    def hear_first_hub(self, now_s: float) -> None:
        """Note that the first hub is alive."""
        self._first_hub_s = now_s

    def receive(self, sender: str, message: Message, now_s: float) -> None:
        """Take one message of an agent, or of `scout status`."""
        kind = message.get("t")
        if kind == "status":
            self._start_round(now_s, reply_to=sender)
        elif sender.isdigit() and int(sender) in self._nodes:
            index = int(sender)
            self._nodes[index].heard_s = now_s
            if kind == "alarm":
                self._on_alarm(self._nodes[index], message, now_s)
            elif kind == "snapshots":
                self._on_snapshots(index, message)
            elif kind == "bye":
                self._nodes[index].final = [unpack(packed) for packed in message["snapshots"]]
                self._nodes[index].left_s = now_s

    def advance(self, now_s: float) -> None:
        """Do what is due."""
        if now_s - self._beat_s >= self._plan.beat_s:
            self._beat_s = now_s
            for node in self._plan.nodes:
                self._outlet.send(node.name, {"t": "beat"})
        if now_s >= self._due_s:
            self._due_s = math.inf
            if self._alarmed() and self._leads(now_s):
                self._start_round(now_s)
            elif self._alarmed():
                self._due_s = now_s + self._plan.beat_s
        for round_ in list(self._rounds.values()):
            if not round_.expected or now_s >= round_.deadline_s:
                del self._rounds[round_.number]
                self._conclude(round_, now_s)

    def _leads(self, now_s: float) -> bool:
        if self._plan.index == self._plan.hubs[0].node:
            return True
        if now_s - self._first_hub_s < self._silence_s:
            return False
        self._reporter.event_once("observer_standby_leads", node=self._plan.index)
        return True

    def _is_heard(self, index: int, now_s: float) -> bool:
        state = self._nodes[index]
        return state.final is None and now_s - state.heard_s < self._silence_s

    def _on_alarm(self, node: NodeState, message: Message, now_s: float) -> None:
        late, died = frozenset(message["late"]), frozenset(message["died"])
        more_late, more_died = late - node.late, died - node.died
        node.late, node.died = late, died
        if more_died:
            self._due_s = min(self._due_s, now_s + DEATH_GRACE_S)
        elif more_late:
            self._due_s = now_s
            self._recheck_s = RECHECK_S
        if message["resumed"] and not self._someone_is_late():
            self._reporter.withdraw(now_s)

    def _alarmed(self) -> bool:
        return any(state.late or state.died for state in self._nodes.values())

    def _someone_is_late(self) -> bool:
        return any(state.late for state in self._nodes.values())

    def _start_round(self, now_s: float, reply_to: str = "") -> None:
        self._numbers += 1
        expected = {index for index in self._nodes if self._is_heard(index, now_s)}
        round_ = Round(self._numbers, expected, now_s + ROUND_S, reply_to)
        self._rounds[round_.number] = round_
        question = {"t": "collect", "round": round_.number, "examine": not reply_to}
        for index in expected:
            self._outlet.send(str(index), question)

    def _on_snapshots(self, index: int, message: Message) -> None:
        round_ = self._rounds.get(message["round"])
        if round_ is None:
            return  # it came after the deadline
        round_.expected.discard(index)
        round_.answered |= set(message["answered"])
        round_.traces |= {int(r): trace for r, trace in message["traces"].items() if trace}
        for packed in message["snapshots"]:
            snapshot = unpack(packed)
            round_.snapshots[snapshot.rank] = snapshot

    def _conclude(self, round_: Round, now_s: float) -> None:
        snapshots = with_traces(self._complete(round_, now_s), round_.traces)
        if round_.reply_to:
            self._outlet.send(round_.reply_to, self._reporter.status(snapshots))
            return
        if _may_all_be_ending(snapshots):
            self._due_s = now_s + DEATH_GRACE_S
            return
        sentence = self._reporter.judge(snapshots, now_s)
        if sentence and round_.answered:
            self._say(min(round_.answered), sentence)
        if self._someone_is_late():
            self._due_s = min(self._due_s, now_s + self._recheck_s)
            self._recheck_s = min(RECHECK_MAX_S, 2 * self._recheck_s)

    def _complete(self, round_: Round, now_s: float) -> list[RankSnapshot]:
        """Add what is known of the ranks whose node did not answer."""
        found = dict(round_.snapshots)
        silent = []
        for node in self._plan.nodes:
            found |= self._nodes[node.index].final_now(now_s)
            if any(rank not in found for rank in node.ranks):
                silent.append(node)
        if silent:
            alive = self._reachable({node.address for node in silent if node.address})
            for node in silent:
                may_be_dead = node.address and not self._is_heard(node.index, now_s)
                gone = may_be_dead and node.address not in alive
                found |= self._unanswered(node, bool(gone), found)
        return [found[rank] for rank in sorted(found)]

    def _unanswered(
        self, node: Node, gone: bool, found: Collection[int]
    ) -> dict[int, RankSnapshot]:
        self._reporter.event_once("observer_agent_silent", node=node.index, host=node.host)
        ranks = [rank for rank in node.ranks if rank not in found]
        if gone:
            unreachable = ProcessState.UNREACHABLE
            return {r: RankSnapshot(r, host=node.host, state=unreachable) for r in ranks}
        why = "the observer agent of its machine does not answer"
        return {r: RankSnapshot(r, host=node.host, missing=why) for r in ranks}

    def _say(self, rank: int, text: str) -> None:
        for node in self._plan.nodes:
            if rank in node.ranks:
                self._outlet.send(node.name, {"t": "say", "rank": rank, "text": text})


def _may_all_be_ending(snapshots: Collection[RankSnapshot]) -> bool:
    """A process that was asked to end may be the first of a whole job that is being ended."""
    dead = [s for s in snapshots if s.state is ProcessState.DEAD]
    return were_asked_to_end(dead) and all(
        (s.state_age_s or 0.0) < TERMINATION_GRACE_S for s in dead
    )
