"""Groups and point-to-point channels as all their members see them, put together.

This is where single ranks' counts become facts about a group: who is furthest, who still has an
operation outstanding that others have completed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from scout_core.decision.operations import needs_every_member, on_device
from scout_core.decision.snapshots import (
    Channel,
    GroupState,
    Operation,
    OperationState,
    RankSnapshot,
)


@dataclass(slots=True)
class GroupView:
    """One process group as all its members see it."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    backend: str = ""
    members_known: bool = True
    counter: str = ""
    states: dict[int, GroupState] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    """Waiting rank -> number of its oldest outstanding operation."""

    @property
    def key(self) -> str:
        """Tells this place apart from all others that a rank can wait in."""
        return self.name

    @property
    def title(self) -> str:
        """What to call the group in a sentence."""
        return self.description or f"group {self.name!r}"

    def operation(self, rank: int, sequence: int) -> Operation | None:
        """What is known about an operation, best from the rank itself."""
        own = self.states.get(rank)
        return find_operation(own.operations, sequence) if own else None


@dataclass(slots=True)
class PairView:
    """One direction of point-to-point traffic, seen from both ends."""

    name: str
    ranks: tuple[int, int]
    """Sender, receiver."""
    ends: dict[int, Channel] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    """End -> number of its oldest outstanding operation."""

    @property
    def key(self) -> str:
        """Tells this place apart from all others that a rank can wait in."""
        return f"{self.name} {self.ranks[0]}->{self.ranks[1]}"

    @property
    def title(self) -> str:
        """What to call the channel in a sentence."""
        return f"the channel {self.ranks[0]} -> {self.ranks[1]}"

    def operation(self, rank: int, sequence: int) -> Operation | None:
        """What is known about an operation of one end."""
        own = self.ends.get(rank)
        return find_operation(own.operations, sequence) if own else None


def group_views(snapshots: Collection[RankSnapshot]) -> list[GroupView]:
    """Put the members' states of each group together.

    States with the same name but other members, or of another counter, are different groups.
    """
    found: dict[tuple[str, str], list[GroupView]] = defaultdict(list)
    for snapshot in snapshots:
        for state in snapshot.groups:
            views = found[state.counter, state.name]
            view = next((v for v in views if _same(v.ranks, state.ranks)), None)
            if view is None:
                view = GroupView(state.name, state.ranks, counter=state.counter)
                views.append(view)
            view.states[snapshot.rank] = state
            _note_pending(view, snapshot.rank, state)
            view.description = view.description or state.description
            view.backend = view.backend or state.backend
            view.members_known = view.members_known and state.members_known
    return [view for views in found.values() for view in views]


def pair_views(snapshots: Collection[RankSnapshot]) -> list[PairView]:
    """Put the two ends of each point-to-point channel together."""
    found: dict[tuple[str, str, int, int], PairView] = {}
    for snapshot in snapshots:
        for channel in snapshot.channels:
            ends = (snapshot.rank, channel.peer)
            pair = ends if channel.sending else ends[::-1]
            key = (channel.counter, channel.group, *pair)
            view = found.setdefault(key, PairView(channel.group, pair))
            view.ends[snapshot.rank] = channel
            _note_pending(view, snapshot.rank, channel)
    return list(found.values())


def oldest_outstanding(state: GroupState | Channel) -> int | None:
    """Return the number of the first operation that was entered and is not complete."""
    if state.completed is not None and state.enqueued is not None:
        if state.completed >= state.enqueued:
            return None
        done = {op.sequence for op in state.operations if op.state is OperationState.COMPLETED}
        sequence = state.completed + 1
        while sequence in done:
            sequence += 1
        return sequence if sequence <= state.enqueued else None
    floor = state.completed
    pending = (
        op.sequence
        for op in state.operations
        if op.state is not OperationState.COMPLETED and (floor is None or op.sequence > floor)
    )
    return min(pending, default=None)


def _note_pending(view: GroupView | PairView, rank: int, state: GroupState | Channel) -> None:
    oldest = oldest_outstanding(state)
    if oldest is not None:
        view.pending[rank] = oldest


def furthest_completed(view: GroupView) -> int | None:
    """Return the number of the last operation that some member has completed."""
    return max((s.completed for s in view.states.values() if s.completed is not None), default=None)


def overtaken(view: GroupView) -> dict[int, Operation | None]:
    """Return the ranks that still have an operation outstanding which a member has completed.

    Rule (A) of the wait-for graph. The value is such an operation that no member can complete
    before all have joined: then the rank's own device is stuck. It is None when no such
    operation is known, and the rank may just be held up by something else.
    """
    reached = furthest_completed(view)
    late = {r: n for r, n in view.pending.items() if reached is not None and n <= reached}
    if reached is None or not late:
        return {}
    names = _names(view)
    behind: dict[int, Operation | None] = {}
    for rank, oldest in late.items():
        proofs = (
            op
            for op in view.states[rank].operations
            if oldest <= op.sequence <= reached
            and op.state is not OperationState.COMPLETED
            and needs_every_member(op.name)
            and names[op.sequence] == {op.name}
        )
        behind[rank] = next(proofs, None)
    return behind


def furthest_started(view: GroupView) -> int | None:
    """Return the number of the last operation that runs on some member's device."""
    return max((s.started for s in view.states.values() if s.started is not None), default=None)


def stuck_on_device(views: Collection[GroupView]) -> dict[int, tuple[GroupView, Operation]]:
    """Return the ranks whose device provably does not finish what all members have joined."""
    return {
        rank: (view, operation)
        for view in views
        if on_device(view.backend)
        for rank, operation in overtaken(view).items()
        if operation is not None
    }


def held_by_device(groups: Collection[GroupView], pairs: Collection[PairView]) -> set[int]:
    """Return the ranks with an operation outstanding on their device that no peer holds up.

    Weaker than `stuck_on_device`: the device may also be held up by something not seen here.
    """
    held: set[int] = set()
    for view in groups:
        if on_device(view.backend):
            held.update(overtaken(view))
            held.update(_not_begun(view))
    for pair in pairs:
        for rank, oldest in pair.pending.items():
            channel = pair.ends[rank]
            other = pair.ends.get(channel.peer)
            done = None if other is None else other.completed
            if on_device(channel.backend) and done is not None and oldest <= done:
                held.add(rank)
    return held


def _not_begun(view: GroupView) -> list[int]:
    """Ranks whose device has not begun what another member's device is already in."""
    begun = furthest_started(view)
    if begun is None:
        return []
    return [
        rank
        for rank, oldest in view.pending.items()
        if (started := view.states[rank].started) is not None and started < oldest <= begun
    ]


def least_entered(state: GroupState) -> int:
    """Return a number up to which operations were entered, whatever else is unknown."""
    known = [op.sequence for op in state.operations]
    known += [n for n in (state.enqueued, state.completed) if n is not None]
    return max(known, default=-1)


def find_operation(operations: Sequence[Operation], sequence: int) -> Operation | None:
    """Return the operation of that number, if it is known."""
    return next((op for op in operations if op.sequence == sequence), None)


def _names(view: GroupView) -> dict[int, set[str]]:
    """By number, what the members know the operation to be."""
    names: dict[int, set[str]] = defaultdict(set)
    for state in view.states.values():
        for operation in state.operations:
            names[operation.sequence].add(operation.name)
    return names


def _same(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return a is b or (len(a) == len(b) and a == b)
