"""Who waits for whom: the wait-for graph over all groups and point-to-point channels.

A collective can only complete when every member has joined it. So a rank with an outstanding
operation waits for the members that have not entered it; when all have entered it, for whatever
holds those members up. Following the edges leads to the ranks that hold everybody up.

# Note [Levels]
The ranks that are absent from operation s of a group are those with `enqueued` < s. Members are
therefore sorted by `enqueued`; level i is a node with an edge to each member of that count and one
edge to level i - 1. A wait needs one edge, to the highest level below s, and the graph stays
linear in the number of memberships however many different operations the members wait in.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.decision.snapshots import Channel, Operation, ProcessState, RankSnapshot
from scout_core.decision.views import (
    GroupView,
    PairView,
    furthest_completed,
    furthest_started,
    least_entered,
)

GONE = frozenset({ProcessState.DEAD, ProcessState.STOPPED, ProcessState.UNREACHABLE})
"""States in which a rank cannot take part in anything."""
NEVER = -2
"""Less than any count: -1 already means that nothing was entered yet."""
ANYONE = -1
"""Stands for a member of a group that no source names."""


class WaitKind(enum.Enum):
    """Why an outstanding operation does not complete."""

    ABSENT = "absent"  # some member has not entered it
    JOINED = "joined"  # all members have entered it, none has completed it
    UNCERTAIN = "uncertain"  # no shared numbers: the other end may have arrived, or be done
    UNSEEN = "unseen"  # all members that can be seen have entered it


class Wait(NamedTuple):
    """The oldest outstanding operation of one rank in one group or channel."""

    rank: int
    place: GroupView | PairView
    sequence: int
    kind: WaitKind
    operation: Operation | None
    targets: tuple[int, ...]
    """Nodes of the graph that it waits for."""


@dataclass(slots=True)
class WaitGraph:
    """Nodes are ranks, levels of groups, and ranks of which the needed evidence is missing."""

    successors: list[list[int]]
    """By node."""
    rank_of: list[int]
    """Global rank of a node; -1 for a level or for missing evidence."""
    node_of: dict[int, int]
    """Node of a global rank that has a snapshot."""
    unseen: dict[int, int]
    """Global rank, or ANYONE -> node that stands for "not known what it does"."""
    waits: dict[int, list[Wait]]
    """By waiting rank."""


def build_graph(
    snapshots: Sequence[RankSnapshot],
    groups: Collection[GroupView],
    pairs: Collection[PairView],
    released: Collection[int] = (),
) -> WaitGraph:
    """Build the wait-for graph.

    Args:
        snapshots: one per rank; one that is `missing` counts as no evidence at all.
        groups, pairs: the views made of these snapshots.
        released: global ranks that wait for nobody, whatever they have entered.
    """
    seen = {s.rank: s for s in snapshots if not s.missing}
    ranks = list(seen)
    graph = WaitGraph(
        successors=[[] for _ in ranks],
        rank_of=ranks,
        node_of={rank: node for node, rank in enumerate(ranks)},
        unseen={},
        waits=defaultdict(list),
    )
    held = frozenset(released)
    for group in groups:
        _add_group(graph, seen, group, held)
    for pair in pairs:
        _add_pair(graph, seen, pair, held)
    return graph


def _add_group(
    graph: WaitGraph,
    seen: Mapping[int, RankSnapshot],
    view: GroupView,
    released: frozenset[int],
) -> None:
    if len(view.ranks) < 2 and view.members_known:
        return  # a group of one waits for nobody
    waiting = [(rank, number) for rank, number in view.pending.items() if rank not in released]
    if not waiting:
        return
    members = _Members(graph, seen, view)
    for rank, sequence in waiting:
        kind, targets = members.held_up_by(rank, sequence)
        if kind is not None:
            operation = view.operation(rank, sequence)
            _add(graph, Wait(rank, view, sequence, kind, operation, tuple(targets)))


class _Members:
    """Finds whom an operation of one group waits for; builds the group's levels once."""

    def __init__(self, graph: WaitGraph, seen: Mapping[int, RankSnapshot], view: GroupView) -> None:
        self._graph, self._view = graph, view
        self._reached = furthest_completed(view)
        self._begun = furthest_started(view)
        self._late_starters: dict[int, list[int]] = {}
        self._hidden_nodes: dict[int, list[int]] = {}
        levels: dict[int, list[int]] = defaultdict(list)
        self._unknown: dict[int, int] = {}
        for rank in view.ranks:
            snapshot, state = seen.get(rank), view.states.get(rank)
            if snapshot is None:
                self._unknown[rank] = NEVER
            elif state is not None and state.enqueued is not None:
                levels[state.enqueued].append(graph.node_of[rank])
            elif snapshot.state in GONE or (state is None and view.counter in snapshot.complete):
                levels[NEVER].append(graph.node_of[rank])
            else:
                self._unknown[rank] = NEVER if state is None else least_entered(state)
        self._counts = sorted(levels)
        self._nodes: list[int] = []
        for count in self._counts:
            self._nodes.append(_new_node(graph, [*levels[count], *self._nodes[-1:]]))

    def held_up_by(self, rank: int, sequence: int) -> tuple[WaitKind | None, list[int]]:
        """Return why an operation does not complete, and the nodes it waits for.

        None when nobody else holds it up: a member has completed it (rule A), or other members'
        devices are already in it while this rank's has not begun it.
        """
        if self._reached is not None and sequence <= self._reached:
            return None, []
        hidden = self._hidden(sequence)
        below = bisect_left(self._counts, sequence)
        if below:
            return WaitKind.ABSENT, [self._nodes[below - 1], *hidden]
        if hidden:
            return WaitKind.UNSEEN, hidden
        if self._begun is not None and self._begun >= sequence:
            if _starts_before(self._view, rank, sequence):
                return None, []
            return WaitKind.JOINED, self._late(sequence) or self._nodes[-1:]
        return WaitKind.JOINED, self._nodes[-1:]

    def _hidden(self, sequence: int) -> list[int]:
        """Return one node that leads to the members of which it is not known if they arrived."""
        if sequence not in self._hidden_nodes:
            nodes = [unseen_node(self._graph, q) for q, n in self._unknown.items() if n < sequence]
            if not self._view.members_known:
                nodes.append(unseen_node(self._graph, ANYONE))
            self._hidden_nodes[sequence] = [_new_node(self._graph, nodes)] if nodes else []
        return self._hidden_nodes[sequence]

    def _late(self, sequence: int) -> list[int]:
        """Members whose device has not begun what another member's device is already in."""
        if sequence not in self._late_starters:
            self._late_starters[sequence] = [
                self._graph.node_of[q]
                for q in self._view.states
                if _starts_before(self._view, q, sequence)
            ]
        return self._late_starters[sequence]


def _starts_before(view: GroupView, rank: int, sequence: int) -> bool:
    started = view.states[rank].started
    return started is not None and started < sequence


def _add_pair(
    graph: WaitGraph,
    seen: Mapping[int, RankSnapshot],
    view: PairView,
    released: frozenset[int],
) -> None:
    for rank, sequence in view.pending.items():
        if rank in released:
            continue
        channel = view.ends[rank]
        kind = _pair_kind(view, channel, sequence, seen.get(channel.peer))
        if kind is not None:
            hidden = kind is WaitKind.UNSEEN
            peer = unseen_node(graph, channel.peer) if hidden else graph.node_of[channel.peer]
            operation = view.operation(rank, sequence)
            _add(graph, Wait(rank, view, sequence, kind, operation, (peer,)))


def _pair_kind(
    view: PairView, channel: Channel, sequence: int, peer: RankSnapshot | None
) -> WaitKind | None:
    """Why a send or receive does not complete; None when the other end has completed it."""
    if peer is None:
        return WaitKind.UNSEEN
    other = view.ends.get(channel.peer)
    if other is None or other.enqueued is None or channel.enqueued is None:
        if channel.counter in peer.complete or peer.state in GONE:
            return WaitKind.ABSENT if other is None else WaitKind.UNCERTAIN
        lost = peer.truncated and channel.peer not in view.pending
        return WaitKind.UNSEEN if lost else WaitKind.UNCERTAIN
    if other.enqueued < sequence:
        return WaitKind.ABSENT
    done = other.completed is not None and other.completed >= sequence
    return None if done else WaitKind.JOINED


def _add(graph: WaitGraph, wait: Wait) -> None:
    graph.waits[wait.rank].append(wait)
    graph.successors[graph.node_of[wait.rank]].extend(wait.targets)


def unseen_node(graph: WaitGraph, rank: int) -> int:
    """Return the node for "not known what this rank does", and create it when there is none."""
    if rank not in graph.unseen:
        graph.unseen[rank] = _new_node(graph, [])
    return graph.unseen[rank]


def _new_node(graph: WaitGraph, successors: list[int]) -> int:
    graph.successors.append(successors)
    graph.rank_of.append(-1)
    return len(graph.successors) - 1
