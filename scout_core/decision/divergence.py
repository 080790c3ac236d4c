"""Members of one group that did not enter the same operation: C3 Exact on fingerprints.

Waiters leave mutually equal fingerprints; a minority that differs took another
path through the program. Divergence is a cause, never a consequence of waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from scout_core.decision.consensus import Status, exact
from scout_core.decision.evidence import Fingerprint, Missing
from scout_core.decision.snapshots import Operation, OperationState
from scout_core.decision.views import GroupView, PairView, find_operation


class Camp(NamedTuple):
    """Members that did the same."""

    what: str
    """The operation, or the members the group has for them."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    call_site: str


class Divergence(NamedTuple):
    """The first place where members of a group, or the ends of a channel, differ."""

    place: GroupView | PairView
    sequence: int | None
    """None when they differ in who belongs to the group."""
    camps: tuple[Camp, ...]
    """Largest first."""
    culprits: tuple[int, ...]
    """The minority, ascending; empty when no camp has a strict majority of the members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all camps, ascending."""
        return tuple(sorted(rank for camp in self.camps for rank in camp.ranks))


def find_divergences(groups: Sequence[GroupView], pairs: Sequence[PairView]) -> list[Divergence]:
    """Return the first divergence of each group and channel that somebody waits in."""
    found = [_in_membership(views) for views in _same_name(groups)]
    found += [_in_operations(view) for view in groups]
    found += [_in_pair(view) for view in pairs]
    return [divergence for divergence in found if divergence is not None]


def describe(operation: Operation | None) -> str:
    """Say what an operation is: "broadcast of float32 x 4"."""
    if operation is None:
        return "an operation"
    return f"{operation.name} of {operation.arguments}" if operation.arguments else operation.name


def _in_operations(view: GroupView) -> Divergence | None:
    last = max(view.pending.values(), default=None)
    if last is None:
        return None
    entered: dict[int, dict[int, Operation]] = defaultdict(dict)
    for rank, state in view.states.items():
        for operation in state.operations:
            if operation.sequence <= last:
                entered[operation.sequence][rank] = operation
    differing = [n for n, by_rank in entered.items() if _differ(by_rank.values())]
    for number in sorted(differing):
        if any(_incomplete(view, rank, number) for rank in view.states):
            return _divergence(view, number, entered[number], view.ranks)
    return None


def _incomplete(view: GroupView, rank: int, sequence: int) -> bool:
    """What everybody has completed holds nobody up, however it was called."""
    state = view.states[rank]
    return state.completed is None or state.completed < sequence


def _differ(operations: Iterable[Operation]) -> bool:
    known = list(operations)
    arguments = {operation.arguments for operation in known if operation.arguments}
    return len({operation.name for operation in known}) > 1 or len(arguments) > 1


def _divergence(
    place: GroupView | PairView,
    sequence: int,
    by_rank: Mapping[int, Operation],
    members: Sequence[int],
) -> Divergence:
    one_name = len({operation.name for operation in by_rank.values()}) == 1
    all_known = all(operation.arguments for operation in by_rank.values())
    values: list[Hashable] = []
    for rank in members:
        operation = by_rank.get(rank)
        if operation is None or (one_name and not operation.arguments):
            values.append(Missing("not known what it entered"))
        else:
            arguments = operation.arguments if one_name or all_known else ""
            values.append(Fingerprint(place.key, sequence, operation.name, arguments))
    what = {rank: describe(operation) for rank, operation in by_rank.items()}
    sites = {rank: operation.call_site for rank, operation in by_rank.items()}
    return Divergence(place, sequence, _camps(what, sites), _minority(members, values))


def _in_membership(views: Sequence[GroupView]) -> Divergence | None:
    """Members that believe the group to have other members than their peers believe."""
    own = {rank: view for view in views for rank in view.states if view.members_known}
    disputed = {
        id(side)
        for view in views
        if view.members_known
        for rank in view.ranks
        if own.get(rank, view) is not view
        for side in (view, own[rank])
    }
    involved = [view for view in views if id(view) in disputed]
    if not any(view.pending for view in involved):
        return None
    members = sorted({rank for view in involved for rank in view.ranks})
    mine = {rank: own[rank] for rank in members if rank in own}
    values = [mine[r].ranks if r in mine else Missing("no evidence") for r in members]
    what = {rank: f"a group of {list(view.ranks)}" for rank, view in mine.items()}
    return Divergence(involved[0], None, _camps(what, {}), _minority(members, values))


def _same_name(groups: Iterable[GroupView]) -> list[list[GroupView]]:
    """Views that share counter and name, where there is more than one."""
    by_name: dict[tuple[str, str], list[GroupView]] = defaultdict(list)
    for view in groups:
        by_name[view.counter, view.name].append(view)
    return [views for views in by_name.values() if len(views) > 1]


def _in_pair(view: PairView) -> Divergence | None:
    """Send and receive under one number that do not fit: another size, dtype or tag."""
    if len(view.pending) < 2:
        return None
    for one, other in _counterparts(view):
        if one.arguments and other.arguments and one.arguments != other.arguments:
            by_rank = dict(zip(view.ranks, (one, other), strict=True))
            return _divergence(view, one.sequence, by_rank, view.ranks)
    return None


def _counterparts(view: PairView) -> list[tuple[Operation, Operation]]:
    """Outstanding sends and receives that meet; by order where there are no shared numbers."""
    sender, receiver = (view.ends[rank] for rank in view.ranks)
    ours, theirs = (view.pending[rank] for rank in view.ranks)
    if sender.enqueued is None or receiver.enqueued is None:
        heads = (
            find_operation(sender.operations, ours),
            find_operation(receiver.operations, theirs),
        )
        return [(heads[0], heads[1])] if heads[0] and heads[1] else []
    pending = [op for op in sender.operations if op.state is not OperationState.COMPLETED]
    met = ((op, find_operation(receiver.operations, op.sequence)) for op in pending)
    return [(op, other) for op, other in met if other is not None]


def _camps(what: Mapping[int, str], sites: Mapping[int, str]) -> tuple[Camp, ...]:
    members: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(what):
        members[what[rank]].append(rank)
    camps = [
        Camp(text, tuple(ranks), next((sites[r] for r in ranks if sites.get(r)), ""))
        for text, ranks in members.items()
    ]
    return tuple(sorted(camps, key=lambda camp: (-len(camp.ranks), camp.ranks)))


def _minority(members: Sequence[int], values: Collection[Hashable]) -> tuple[int, ...]:
    verdict = exact(list(values))
    if verdict.status is not Status.ATTRIBUTED:
        return ()
    return tuple(sorted(members[position] for position in verdict.outliers))
