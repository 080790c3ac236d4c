"""Several sources about the same rank become one snapshot: observer, dump and log add up.

Counts of different counters stay apart; of the same counter, the source that saw more wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from scout_core.decision.snapshots import Channel, GroupState, Operation, RankSnapshot

_JOINED = frozenset({"rank", "missing", "groups", "channels", "complete", "source"})
_ALL_MUST_SAY = frozenset({"truncated", "unseen_p2p", "within_limit"})


def merge(snapshots: Sequence[RankSnapshot]) -> RankSnapshot:
    """Put the evidence of several sources about one rank together.

    Args:
        snapshots: at least one, all of the same rank, the most trusted source first.
    """
    present = [s for s in snapshots if not s.missing]
    if len(present) < 2:
        return (present or list(snapshots))[0]
    chosen: dict[str, Any] = {}
    for field in fields(RankSnapshot):
        if field.name in _ALL_MUST_SAY:
            chosen[field.name] = all(getattr(s, field.name) for s in present)
        elif field.name not in _JOINED:
            said = (getattr(s, field.name) for s in present)
            chosen[field.name] = next((v for v in said if v != field.default), field.default)
    return RankSnapshot(
        rank=present[0].rank,
        source=" + ".join(s.source for s in present if s.source),
        complete=tuple(dict.fromkeys(counter for s in present for counter in s.complete)),
        groups=_merge_groups(state for s in present for state in s.groups),
        channels=_merge_channels(channel for s in present for channel in s.channels),
        **chosen,
    )


def share_members(snapshots: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    """Give every member what some source knows for certain about who belongs to a group."""
    listed = list(snapshots)
    known: dict[tuple[str, str], tuple[int, ...]] = {}
    guessed: dict[tuple[str, str], set[int]] = {}
    for snapshot in listed:
        for state in snapshot.groups:
            if state.members_known:
                known.setdefault((state.counter, state.name), state.ranks)
            guessed.setdefault((state.counter, state.name), set()).update(state.ranks)
    shared = {key: tuple(sorted(ranks)) for key, ranks in guessed.items()}
    return [
        replace(s, groups=tuple(_with_members(state, known, shared) for state in s.groups))
        for s in listed
    ]


def _with_members(
    state: GroupState,
    known: Mapping[tuple[str, str], tuple[int, ...]],
    shared: Mapping[tuple[str, str], tuple[int, ...]],
) -> GroupState:
    if state.members_known:
        return state
    key = (state.counter, state.name)
    return replace(state, ranks=known.get(key, shared[key]), members_known=key in known)


def _merge_groups(states: Iterable[GroupState]) -> tuple[GroupState, ...]:
    found: dict[tuple[str, str], GroupState] = {}
    for state in states:
        key = (state.counter, state.name)
        found[key] = _add(found[key], state) if key in found else state
    return tuple(found.values())


def _add(first: GroupState, second: GroupState) -> GroupState:
    certain = first if first.members_known or not second.members_known else second
    return replace(
        first,
        ranks=certain.ranks,
        members_known=certain.members_known,
        enqueued=_larger(first.enqueued, second.enqueued),
        completed=_larger(first.completed, second.completed),
        started=_larger(first.started, second.started),
        operations=_merge_operations((*second.operations, *first.operations)),
        description=first.description or second.description,
        backend=first.backend or second.backend,
    )


def _merge_operations(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Of two records of the same operation the later one is kept."""
    by_number = {operation.sequence: operation for operation in operations}
    return tuple(by_number[number] for number in sorted(by_number))


def _merge_channels(channels: Iterable[Channel]) -> tuple[Channel, ...]:
    found: dict[tuple[str, str, int, bool], Channel] = {}
    for channel in channels:
        key = (channel.counter, channel.group, channel.peer, channel.sending)
        if key not in found or (found[key].enqueued is None and channel.enqueued is not None):
            found[key] = channel
    return tuple(found.values())


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
