"""Which sends and receives meet: numbers that both ends of a point-to-point channel share.

NCCL numbers the sends and receives of a rank per group, not per pair. The numbers of two ends agree
only where each of them exchanges with nobody but the other in that group (a pipeline of two stages,
or a group of two). That is checked here; where it does not hold, there are no shared numbers and
the verdict treats the channel with less certainty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from scout_core.evidence.dump_format import Entry, Status


class _Facts(Protocol):
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def has_pairs(self) -> bool: ...
    @property
    def most_collectives(self) -> int: ...


class PairCount(NamedTuple):
    """How far one rank got with its sends and receives in one group."""

    enqueued: int
    completed: int | None
    """At least this far, as far as its status tells."""
    whole: bool
    """Everything that is outstanding is listed."""


Place = tuple[str, int]
"""(group, global rank)."""


def shared_numbers(
    entries: Mapping[int, Mapping[str, Sequence[Entry]]],
    status: Mapping[int, Mapping[str, Status]],
    facts: Mapping[str, _Facts],
) -> dict[int, dict[Place, PairCount]]:
    """Return, by rank and (group, peer), the counts of ranks that number like their peer.

    Args:
        entries: global rank -> group -> entries, oldest first.
        status: global rank -> group -> status.
        facts: by group.
    """
    found: dict[int, dict[Place, PairCount]] = defaultdict(dict)
    for name, fact in facts.items():
        if not fact.has_pairs:
            continue
        mine = {rank: _pairs_of(entries[rank].get(name, ())) for rank in entries}
        counts = {
            rank: count
            for rank, listed in mine.items()
            if (count := _count(listed, status[rank].get(name), fact)) is not None
        }
        for a, b in _aligned(fact, mine):
            if a in counts:
                found[a][name, b] = counts[a]
            if b in counts:
                found[b][name, a] = counts[b]
    return found


def _pairs_of(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.is_pair]


def _count(listed: Sequence[Entry], status: Status | None, fact: _Facts) -> PairCount | None:
    shown = max((entry.pair for entry in listed), default=None)
    if status is not None and status.enqueued > fact.most_collectives:
        listed_numbers = {entry.pair for entry in listed if entry.pair > status.completed}
        whole = len(listed_numbers) >= status.enqueued - status.completed
        return PairCount(max(status.enqueued, shown or 0), status.completed, whole)
    if shown is None:
        return None
    pending = [entry.pair for entry in listed if not entry.done]
    earliest = min(pending, default=shown + 1)
    return PairCount(shown, None, any(entry.pair < earliest for entry in listed))


def _aligned(fact: _Facts, mine: Mapping[int, Sequence[Entry]]) -> list[tuple[int, int]]:
    """Pairs of ranks that exchange with nobody else in the group, and whose numbers agree."""
    peers = {rank: _peers(fact, listed) for rank, listed in mine.items()}
    pairs = {
        (min(rank, peer), max(rank, peer))
        for rank, others in peers.items()
        for peer in others
        if others == {peer} and peers.get(peer, set()) <= {rank}
    }
    if len(fact.ranks) == 2:
        return sorted(pairs)
    both_shown = [(a, b) for a, b in pairs if mine.get(a) and mine.get(b)]
    agreed = [pair for pair in both_shown if _numbers_meet(mine[pair[0]], mine[pair[1]])]
    return sorted(pairs) if 2 * len(agreed) > len(both_shown) else sorted(agreed)


def _peers(fact: _Facts, listed: Sequence[Entry]) -> set[int]:
    positions = {entry.peer_position for entry in listed if entry.peer_position is not None}
    return {fact.ranks[p] if p < len(fact.ranks) else -1 for p in positions}


def _numbers_meet(first: Sequence[Entry], second: Sequence[Entry]) -> bool:
    """Some number is a send on one end and a receive on the other, and none clashes."""
    ours = {(entry.pair, entry.name) for entry in first}
    theirs = {(entry.pair, entry.name) for entry in second}
    other = {"send": "recv", "recv": "send"}
    clash = any(pair in theirs and (pair[0], other.get(pair[1])) not in theirs for pair in ours)
    return not clash and any((number, other.get(name)) in theirs for number, name in ours)
