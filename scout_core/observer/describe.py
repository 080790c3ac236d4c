"""Turn what an agent knows about a trainer into the snapshot that the hang verdict is made from."""

from __future__ import annotations

import time
from typing import Final

from scout_core.decision.evidence import Progress
from scout_core.decision.snapshots import (
    SCOUT_COUNTER,
    Channel,
    GroupState,
    Operation,
    OperationState,
    Phase,
    ProcessState,
    RankSnapshot,
)
from scout_core.evidence import ring
from scout_core.evidence.stack import line_to_look_at
from scout_core.observer.limits import Limits
from scout_core.observer.member import Examination, Member

RECENT: Final = 6
"""Operations of each order that go into a snapshot besides those that are pending."""
_WAITS_FOR_LOCK: Final = ("futex",)
_SLEEPS: Final = ("nanosleep",)


def snapshot_of(
    member: Member, examination: Examination | None, limits: Limits, *, host: str
) -> RankSnapshot:
    """Describe one trainer.

    Args:
        examination: a finished one; None when the trainer was not asked.
    """
    now_s = time.monotonic()
    state = member.ring.state()
    process, age_s = _process(member, examination, now_s)
    refreshed = examination is not None and examination.refreshed
    orders = [
        _Order(index, order, state, refreshed or member.ended)
        for index, order in enumerate(state.orders)
    ]
    wrapped = state.counters.operations > ring.OPERATION_SLOTS
    return RankSnapshot(
        rank=member.rank,
        host=host,
        device=member.contact.device,
        state=process,
        state_age_s=age_s,
        exit_code=member.exit_code,
        progress=Progress(state.progress.step, state.progress.operation),
        phase=member.phase,
        phase_age_s=round(member.silent_s(now_s), 3),
        blocked=_blocked(member, examination, state),
        within_limit=not member.ended and member.silent_s(now_s) <= limits.of(member.phase),
        where=_where(member, examination, state),
        error=state.end_reason,
        truncated=wrapped,
        source="observer",
        complete=(SCOUT_COUNTER,) if state.lost == 0 else (),
        unseen_p2p=any(o.kind != ring.COLLECTIVE and o.peer < 0 for o in state.orders),
        groups=tuple(o.as_group() for o in orders if o.order.kind == ring.COLLECTIVE),
        channels=tuple(
            o.as_channel() for o in orders if o.order.kind != ring.COLLECTIVE and o.order.peer >= 0
        ),
    )


class _Order:
    """One order of a ring with its recent operations."""

    def __init__(self, index: int, order: ring.Order, state: ring.RingState, exact: bool) -> None:
        self.order = order
        self.group = state.groups[order.group]
        self._operations = [o for o in state.operations if o.order == index]
        pending = order.completed is None or order.completed < order.entered
        # What was pending when the trainer last looked may have completed since.
        self.completed = order.completed if exact or not pending else None

    def as_group(self) -> GroupState:
        return GroupState(
            name=self.group.name,
            ranks=self.group.ranks,
            enqueued=self.order.entered,
            completed=self.completed,
            operations=self.recent(),
            backend=self.group.backend,
            members_known=bool(self.group.ranks),
        )

    def as_channel(self) -> Channel:
        return Channel(
            group=self.group.name,
            peer=self.order.peer,
            sending=self.order.kind == ring.SEND,
            enqueued=self.order.entered,
            completed=self.completed,
            operations=self.recent(),
            backend=self.group.backend,
        )

    def recent(self) -> tuple[Operation, ...]:
        """The last operations, and whatever is pending, in order."""
        last = len(self._operations) - RECENT
        now_ns = time.monotonic_ns()
        return tuple(
            _operation(operation, self.completed, now_ns)
            for place, operation in enumerate(self._operations)
            if place >= last or not operation.done_ns
        )


def _operation(found: ring.Operation, completed: int | None, now_ns: int) -> Operation:
    name, _, arguments = found.operation.partition(" ")
    sized = f"{arguments} numel {found.numel}" if found.numel >= 0 else arguments
    done = found.done_ns or (completed is not None and found.sequence <= completed)
    return Operation(
        sequence=found.sequence,
        name=name,
        arguments=f"{sized} tag {found.tag}" if found.tag else sized,
        state=OperationState.COMPLETED if done else OperationState.SCHEDULED,
        call_site=found.site,
        age_s=round((now_ns - found.entered_ns) / 1e9, 3),
    )


def _process(
    member: Member, examination: Examination | None, now_s: float
) -> tuple[ProcessState, float | None]:
    """State of the process, and for how long it has been known to be in it."""
    if member.ended_s is not None:
        ended = ProcessState.EXITED if member.finished else ProcessState.DEAD
        return ended, round(now_s - member.ended_s, 3)
    if member.died:  # an exception that nobody caught: the process is on its way out
        return ProcessState.DEAD, round(now_s - member.ring.end_ns() / 1e9, 3)
    return (ProcessState.ALIVE if examination is None else examination.activity.state), None


def _blocked(member: Member, examination: Examination | None, state: ring.RingState) -> bool | None:
    """Does its thread wait inside a communication call? None unless one can be certain."""
    if examination is None or member.ended or any(g.backend != "gloo" for g in state.groups):
        return None  # a device's wait may spin, sleep or poll
    activity = examination.activity
    if examination.holds_gil:
        return False  # a wait for communication gives the GIL up
    if not examination.stack or not activity.asleep:
        return None
    if any(word in activity.waits_in for word in _SLEEPS):
        return False
    inside = examination.stack[0].startswith(member.contact.internal)
    waits = any(word in activity.waits_in for word in _WAITS_FOR_LOCK)
    return True if inside and waits else None


def _where(member: Member, examination: Examination | None, state: ring.RingState) -> str:
    """The line it is at; of a process that cannot be asked, the line of its last operation."""
    if examination is not None and examination.stack:
        line = line_to_look_at(examination.stack, member.contact.internal)
        return f"{line} (in native code that keeps the GIL)" if examination.holds_gil else line
    if not state.operations or member.phase is Phase.FINISHED:
        return state.progress.detail
    return f"{state.operations[-1].site} or after it"
