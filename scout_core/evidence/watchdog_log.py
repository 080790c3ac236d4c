"""Evidence in the text that torch's NCCL watchdog writes to stderr when a collective times out.

Less than a dump: only ranks that noticed something write, and members of groups are not named. The
numbers are those of the Flight Recorder, so logs and dumps of one job add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from scout_core.decision.operations import one_word
from scout_core.decision.snapshots import C10D_COUNTER, GroupState, Operation, RankSnapshot

_MARKS = ("WorkNCCL(", "last enqueued", "last completed")
_GLOBAL_RANK = re.compile(r"\[(?:default\d+\]:)?\[?rank(\d+)\]")
_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?([\w.-]+?)(?:\(([^)]*)\))? Rank (\d+)\]")
_BARE_RANK = re.compile(r"\[Rank (\d+)\]")
_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(.*)")
_COUNT = re.compile(r"NumelIn=(\d+), NumelOut=(\d+)|TensorShape=(\[[\d, ]*\])")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d+)")
_AGE = re.compile(r"ran for (\d+) milliseconds")
_DEFAULT_GROUP = "0"
_UNEVEN = frozenset({"all_to_all", "gather", "scatter"})


@dataclass
class _Seen:
    """What the lines of one rank say about one group."""

    description: str = ""
    enqueued: int | None = None
    completed: int | None = None
    operations: dict[int, Operation] = field(default_factory=dict)
    pairs: bool = False
    """Its numbers are those of sends and receives."""


def is_watchdog_line(line: str) -> bool:
    """Tell whether a line of a log is worth parsing."""
    return any(mark in line for mark in _MARKS)


def parse_log(lines: Iterable[str], source: str) -> list[RankSnapshot]:
    """Read the watchdog's lines out of a log of one or of many ranks.

    Lines that do not say which rank wrote them, or that belong to no group, are left out.

    Returns:
        One snapshot per rank that wrote something, in rank order. Groups have `members_known`
        False: a rank that wrote nothing may belong to them.
    """
    seen: dict[int, dict[str, _Seen]] = {}
    for line in filter(is_watchdog_line, lines):
        place = _place(line)
        if place is not None:
            rank, name, description = place
            _read_line(line, seen.setdefault(rank, {}).setdefault(name, _Seen()), description)
    members: dict[str, set[int]] = {}
    for rank, groups in seen.items():
        for name in groups:
            members.setdefault(name, set()).add(rank)
    return [_snapshot(rank, seen[rank], members, source) for rank in sorted(seen)]


def _place(line: str) -> tuple[int, str, str] | None:
    """Return (global rank, group, its description), or None when the line does not tell.

    The rank inside the group's prefix is a position in the group: it is the global rank only in
    the default group.
    """
    everywhere, group, bare = (p.search(line) for p in (_GLOBAL_RANK, _GROUP, _BARE_RANK))
    name, description = (group[1], group[2] or "") if group else (_DEFAULT_GROUP, "")
    if everywhere:
        return int(everywhere[1]), name, description
    if group:
        is_default = name == _DEFAULT_GROUP or description == "default_pg"
        return (int(group[3]), name, description) if is_default else None
    return (int(bare[1]), name, description) if bare else None


def _read_line(line: str, seen: _Seen, description: str) -> None:
    seen.description = seen.description or description
    work = _WORK.search(line)
    if work:
        name, number, rest = one_word(work[2]), int(work[1]), work[3]
        seen.pairs = seen.pairs or name in ("send", "recv")
        age = _AGE.search(rest)
        seen.operations[number] = Operation(
            sequence=number,
            name=name,
            arguments=_arguments(name, rest),
            age_s=int(age[1]) / 1e3 if age else None,
        )
    for pattern, attribute in ((_ENQUEUED, "enqueued"), (_COMPLETED, "completed")):
        found = pattern.search(line)
        if found:
            before = getattr(seen, attribute)
            number = max(int(found[1]), 0)  # -1: none yet; the first one is number 1
            setattr(seen, attribute, number if before is None else max(before, number))


def _arguments(name: str, text: str) -> str:
    found = _COUNT.search(text)
    if not found or name in _UNEVEN or name == "barrier":
        return ""
    return f"shape {found[3]}" if found[3] else f"{found[1]} -> {found[2]} elements"


def _snapshot(
    rank: int, groups: dict[str, _Seen], members: dict[str, set[int]], source: str
) -> RankSnapshot:
    in_a_pair = any(seen.pairs for seen in groups.values())
    return RankSnapshot(
        rank=rank,
        source=source,
        # The log does not say with whom it exchanges, only that it waits.
        blocked=True if in_a_pair else None,
        groups=tuple(
            _group_state(name, seen, tuple(sorted(members[name])))
            for name, seen in sorted(groups.items())
            if not seen.pairs
        ),
    )


def _group_state(name: str, seen: _Seen, ranks: tuple[int, ...]) -> GroupState:
    timed_out = max(seen.operations, default=None)
    known = [n for n in (seen.enqueued, timed_out) if n is not None]
    return GroupState(
        name=name,
        ranks=ranks,
        enqueued=max(known, default=None),
        completed=seen.completed,
        operations=tuple(seen.operations[number] for number in sorted(seen.operations)),
        description=seen.description,
        backend="nccl",
        counter=C10D_COUNTER,
        members_known=False,
    )
