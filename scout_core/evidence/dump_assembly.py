"""Flight Recorder dumps of a job, put together into rank snapshots.

# Note [Two ways to count]
NCCL's `pg_status` holds the number of the last operation in its own sequence: the collective's, or
for sends and receives the pair's, whichever came last. gloo's holds the call number (`op_id`),
which counts both. NCCL lists sends and receives, and often only what is not complete; gloo lists
every collective but never marks it complete, and never lists sends and receives.

# Note [Local group numbers]
`pg_status` is keyed by a number that differs between ranks, `pg_config` by the group's name.
Entries tell which is which. Groups without entries are matched by order, since both numbers grow
as groups are created; only when the counts agree and no entry contradicts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.decision.operations import on_device
from scout_core.decision.snapshots import (
    C10D_COUNTER,
    Channel,
    GroupState,
    Operation,
    OperationState,
    RankSnapshot,
)
from scout_core.evidence.dump_format import Dump, Entry, Status
from scout_core.evidence.pair_numbers import PairCount, Place, shared_numbers


class GroupFacts(NamedTuple):
    """What all dumps together say about one group."""

    ranks: tuple[int, ...]
    members_known: bool
    backend: str
    has_pairs: bool
    """Some rank's dump shows point-to-point operations in it."""
    most_collectives: int
    """Highest number of a collective that some entry shows."""
    starts_seen: bool


@dataclass(frozen=True)
class _Ring:
    """One rank's dump, by group."""

    dump: Dump
    entries: Mapping[str, tuple[Entry, ...]]
    status: Mapping[str, Status]
    complete: bool
    """It shows everything the rank ever entered."""


def assemble(dumps: Mapping[int, Dump]) -> list[RankSnapshot]:
    """Turn the dumps of a job into snapshots, one per rank, also for ranks without a dump.

    Args:
        dumps: by global rank.
    """
    rings = {rank: _ring(dump) for rank, dump in dumps.items()}
    facts = _group_facts(rings)
    everyone = {rank for fact in facts.values() for rank in fact.ranks} | set(rings)
    numbers = shared_numbers(
        {rank: ring.entries for rank, ring in rings.items()},
        {rank: ring.status for rank, ring in rings.items()},
        facts,
    )
    hidden_pairs = any(_hides_pairs(ring) for ring in rings.values())
    snapshots = []
    for rank in sorted(everyone):
        ring = rings.get(rank)
        if ring is None:
            snapshots.append(RankSnapshot(rank, missing="no dump"))
            continue
        names = sorted({*ring.entries, *ring.status, *ring.dump.members} & set(facts))
        groups = tuple(_group_state(ring, name, facts[name]) for name in names)
        channels = tuple(_channels(ring, names, facts, numbers.get(rank, {})))
        snapshots.append(
            RankSnapshot(
                rank=rank,
                source=ring.dump.source,
                complete=(C10D_COUNTER,) if ring.complete else (),
                truncated=_lost_operations(ring, facts),
                unseen_p2p=hidden_pairs,
                groups=groups,
                channels=channels,
            )
        )
    return snapshots


def _ring(dump: Dump) -> _Ring:
    by_group: dict[str, list[Entry]] = defaultdict(list)
    for entry in dump.entries:
        by_group[entry.group].append(entry)
    names = _names_of_local_ids(dump)
    records = [entry.record for entry in dump.entries]
    return _Ring(
        dump=dump,
        entries={name: tuple(found) for name, found in by_group.items()},
        status={names[i]: status for i, status in dump.status.items() if i in names},
        complete=bool(records) and records == list(range(len(records))),
    )


def _names_of_local_ids(dump: Dump) -> dict[int, str]:
    """See Note [Local group numbers]."""
    known = {entry.local_id: entry.group for entry in dump.entries if entry.local_id >= 0}
    names = list(dump.members)
    if len(names) == len(dump.status) and all(name.isdigit() for name in names):
        pairs = zip(sorted(dump.status), sorted(names, key=int), strict=True)
        by_order = dict(pairs)
        if all(by_order.get(local_id) == name for local_id, name in known.items()):
            return by_order
    return known


def _group_facts(rings: Mapping[int, _Ring]) -> dict[str, GroupFacts]:
    declared: dict[str, tuple[int, ...]] = {}
    users: dict[str, set[int]] = defaultdict(set)
    entries: dict[str, list[Entry]] = defaultdict(list)
    for rank, ring in rings.items():
        for name, ranks in ring.dump.members.items():
            declared.setdefault(name, ranks)
        for name, listed in ring.entries.items():
            users[name].add(rank)
            entries[name].extend(listed)
    backends = {entry.backend for found in entries.values() for entry in found}
    usual = next(iter(backends)) if len(backends) == 1 else ""
    facts = {}
    for name in sorted({*declared, *users}):
        found = entries.get(name, [])
        ranks, known = (
            (declared[name], True)
            if name in declared
            else _pieced_together(users[name], found, rings)
        )
        facts[name] = GroupFacts(
            ranks=ranks,
            members_known=known,
            backend=next((entry.backend for entry in found), usual),
            has_pairs=any(entry.is_pair for entry in found),
            most_collectives=max((entry.collective for entry in found), default=-1),
            starts_seen=any(entry.started for entry in found),
        )
    return facts


def _pieced_together(
    users: Iterable[int], entries: Sequence[Entry], rings: Iterable[int]
) -> tuple[tuple[int, ...], bool]:
    """Members of a group that no dump declares: everybody for the default group, else its users."""
    if any(entry.description == "default_pg" for entry in entries):
        return tuple(range(max(rings) + 1)), True
    return tuple(sorted(users)), False


def _group_state(ring: _Ring, name: str, fact: GroupFacts) -> GroupState:
    entries = ring.entries.get(name, ())
    collectives = [entry for entry in entries if not entry.is_pair]
    status = ring.status.get(name)
    last_call = _last_completed_call(status, fact)
    operations = _operations(collectives, last_call, ring.dump)
    enqueued = _enqueued(entries, status, fact, ring)
    completed = _completed(operations, enqueued, status, fact, ring.complete)
    return GroupState(
        name=name,
        ranks=ring.dump.members.get(name, fact.ranks),
        enqueued=enqueued,
        completed=completed,
        started=_started(operations, enqueued, completed) if fact.starts_seen else None,
        operations=operations,
        description=_description(ring, name, entries),
        backend=fact.backend,
        counter=C10D_COUNTER,
        members_known=fact.members_known,
    )


def _description(ring: _Ring, name: str, entries: Sequence[Entry]) -> str:
    declared = ring.dump.descriptions.get(name, "")
    found = declared or next((entry.description for entry in entries), "")
    return "" if found == "undefined" else found


def _last_completed_call(status: Status | None, fact: GroupFacts) -> int | None:
    """gloo's way to count; see Note [Two ways to count]."""
    return status.completed if status and not on_device(fact.backend) else None


def _operations(
    entries: Sequence[Entry], last_call: int | None, dump: Dump
) -> tuple[Operation, ...]:
    latest_ns = max((entry.created_ns for entry in dump.entries), default=0)
    found: dict[int, Operation] = {}
    for entry in entries:
        done = entry.done or (last_call is not None and entry.call <= last_call)
        state = OperationState.STARTED if entry.started else OperationState.SCHEDULED
        found[entry.collective] = Operation(
            sequence=entry.collective,
            name=entry.name,
            arguments=entry.arguments,
            state=OperationState.COMPLETED if done else state,
            call_site=entry.call_site,
            age_s=(latest_ns - entry.created_ns) / 1e9,
        )
    return tuple(found[number] for number in sorted(found))


def _enqueued(
    entries: Sequence[Entry], status: Status | None, fact: GroupFacts, ring: _Ring
) -> int | None:
    shown = max((entry.collective for entry in entries), default=None)
    if status is not None and on_device(fact.backend) and not fact.has_pairs:
        return max(status.enqueued, 0, shown or 0)
    if shown is None and (ring.complete or (status is not None and status.enqueued <= 0)):
        return 0
    return shown  # also a send or receive says how many collectives came before it


def _completed(
    operations: Sequence[Operation],
    enqueued: int | None,
    status: Status | None,
    fact: GroupFacts,
    complete: bool,
) -> int | None:
    """The status where it counts collectives; otherwise what is before the first pending one.

    The latter only where something complete is shown: what is pending may have been overwritten.
    """
    if status is not None and on_device(fact.backend) and not fact.has_pairs:
        return max(status.completed, 0)
    pending = [op.sequence for op in operations if op.state is not OperationState.COMPLETED]
    done = [op.sequence for op in operations if op.state is OperationState.COMPLETED]
    first = min(pending, default=None)
    if first is None:
        return enqueued if done or complete else None
    return first - 1 if complete or any(number < first for number in done) else None


def _started(
    operations: Sequence[Operation], enqueued: int | None, completed: int | None
) -> int | None:
    """None when not every outstanding operation is shown."""
    if enqueued is None or completed is None:
        return None
    outstanding = [op for op in operations if op.sequence > completed]
    if len(outstanding) < enqueued - completed:
        return None
    waiting = [op.sequence for op in outstanding if op.state is OperationState.SCHEDULED]
    return min(waiting) - 1 if waiting else enqueued


def _channels(
    ring: _Ring,
    names: Iterable[str],
    facts: Mapping[str, GroupFacts],
    numbers: Mapping[Place, PairCount],
) -> Iterable[Channel]:
    """Yield the channels of one rank.

    Args:
        numbers: by (group, peer), how far the rank got, where both ends count alike.
    """
    latest_ns = max((entry.created_ns for entry in ring.dump.entries), default=0)
    found: dict[tuple[str, int, bool], list[Operation]] = defaultdict(list)
    for name in names:
        ranks = facts[name].ranks
        done = _done_batches(ring.entries.get(name, ()))
        for entry in ring.entries.get(name, ()):
            position = entry.peer_position
            if entry.is_pair and position is not None and position < len(ranks):
                key = (name, ranks[position], entry.name == "send")
                finished = entry.done or entry.pair in done
                found[key].append(_pair_operation(entry, finished, latest_ns))
    for name, peer in numbers:
        for sending in (True, False):
            found.setdefault((name, peer, sending), [])
    for (name, peer, sending), operations in sorted(found.items()):
        count = numbers.get((name, peer))
        yield Channel(
            group=name,
            peer=peer,
            sending=sending,
            enqueued=None if count is None else count.enqueued,
            completed=None if count is None else _completed_pairs(operations, count),
            operations=tuple(operations),
            backend=facts[name].backend,
            counter=C10D_COUNTER,
        )


def _completed_pairs(operations: Sequence[Operation], count: PairCount) -> int | None:
    """Both directions share the numbers: what is pending in the other is not pending here."""
    pending = [op.sequence for op in operations if op.state is not OperationState.COMPLETED]
    if not count.whole:
        return count.completed
    return min(pending) - 1 if pending else count.enqueued


def _pair_operation(entry: Entry, finished: bool, latest_ns: int) -> Operation:
    return Operation(
        sequence=entry.pair,
        name=entry.name,
        arguments=entry.arguments,
        state=OperationState.COMPLETED if finished else OperationState.SCHEDULED,
        call_site=entry.call_site,
        age_s=(latest_ns - entry.created_ns) / 1e9,
    )


def _done_batches(entries: Iterable[Entry]) -> set[int]:
    """Numbers of the batches that are complete: only their common entry says so."""
    return {e.pair for e in entries if e.is_pair and e.own_position is None and e.done}


def _lost_operations(ring: _Ring, facts: Mapping[str, GroupFacts]) -> bool:
    """Something may be outstanding that is not shown: the ring has wrapped over it.

    Collectives are safe where the status counts them; sends and receives need their entries.
    """
    if not ring.status:
        oldest = ring.dump.entries[:1]
        return not ring.complete and not (oldest and oldest[0].done)
    for name, status in ring.status.items():
        if name in facts and facts[name].has_pairs:
            entries = ring.entries.get(name, ())
            shown = {
                (e.is_pair, e.pair if e.is_pair else e.collective) for e in entries if not e.done
            }
            if len(shown) < status.enqueued - status.completed:
                return True
    return False


def _hides_pairs(ring: _Ring) -> bool:
    """Calls that are no collective were counted, and none is listed."""
    return any(
        not on_device(entry.backend) and not entry.is_pair and entry.call > entry.collective
        for entry in ring.dump.entries
    )
