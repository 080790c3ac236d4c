"""Timed communication groups, cleaned: which are evidence, whom each accuses, which are healthy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scout_core.decision.topology import AXES, Coordinate, Topology
from scout_core.errors import ScoutError

KINDS = {"dp": "d", "ddp": "d", "fsdp": "s", "tp": "t", "pp": "p", "cp": "c", "ep": "e"}
PAIRWISE = "p"  # pipeline neighbours talk in pairs, which are no whole axis group
INSIDE = "t"  # the kind that is inside one machine where hosts are unknown

INCOMPLETE = "a member did not report"
NOT_JUDGED = "a member did not report, or nothing can tell whether it was slow"

Ranks = npt.NDArray[np.int64]


class Observation(NamedTuple):
    """One process group that was timed."""

    ranks: tuple[int, ...]
    """Global ranks of the members."""
    kind: str
    """Axis letter of "dstpce", or "ddp", "dp", "fsdp", "tp", "pp", "cp", "ep"."""
    slow: bool | None
    """None when a member did not report or nothing can tell: then the group is no evidence."""


@dataclass(frozen=True)
class Group:
    """A slow group. Groups with the same members are one: they are not independent."""

    observations: tuple[Observation, ...]
    members: frozenset[int]
    suspects: frozenset[int]
    """Members that no healthy group of the same kind clears."""
    places: frozenset[str]
    """Hosts of the members; where unknown, the rank itself."""
    inside: bool
    """All members are in one machine."""

    @property
    def kind(self) -> str:
        """Axis letter."""
        return self.observations[0].kind


@dataclass(frozen=True)
class Observed:
    """What is left of the observations: slow groups that accuse, healthy ones that clear."""

    topology: Topology
    slow: tuple[Group, ...]
    healthy: tuple[Observation, ...]
    ignored: tuple[tuple[Observation, str], ...]

    def healthy_with(self, ranks: Sequence[int]) -> tuple[Observation, ...]:
        """Return the healthy groups that have one of these global ranks as a member."""
        numbers = {number for rank in ranks for number in self._healthy_by_rank.get(rank, ())}
        return tuple(self.healthy[number] for number in sorted(numbers))

    def healthy_groups_of(self, rank: int) -> int:
        """Number of healthy groups with this global rank as a member."""
        return len(self._healthy_by_rank.get(rank, ()))

    def healthy_across(self, host: str, kinds: frozenset[str]) -> int:
        """Number of healthy groups of these kinds that join this host to another one."""
        hosts = self.topology.hosts
        return sum(
            o.kind in kinds and len({hosts[rank] for rank in o.ranks}) > 1
            for o in self.healthy_with(self.ranks_on[host])
        )

    def slow_fraction(self, kind: str) -> float:
        """Slow groups of a kind, of all that the job has or that were observed."""
        return self._fractions[kind]

    @cached_property
    def ranks_on(self) -> dict[str, tuple[int, ...]]:
        """Global ranks by host name."""
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, host in enumerate(self.topology.hosts):
            ranks[host].append(rank)
        return {host: tuple(those) for host, those in ranks.items()}

    @cached_property
    def _fractions(self) -> dict[str, float]:
        slow = Counter(group.kind for group in self.slow)
        healthy = Counter(observation.kind for observation in self.healthy)
        fractions = {}
        for place, axis in enumerate(AXES):
            degree = max(address[place] for address in self.topology.dense) + 1
            groups = max(slow[axis] + healthy[axis], self.topology.world_size // degree)
            fractions[axis] = slow[axis] / groups
        return fractions

    @cached_property
    def _healthy_by_rank(self) -> dict[int, list[int]]:
        """Only for members of slow groups: nobody asks for others."""
        hosts = self.topology.hosts
        accused = {rank for group in self.slow for rank in group.members}
        named = {hosts[rank] for rank in accused} - {""}
        asked = np.array([r in accused or hosts[r] in named for r in range(len(hosts))])
        by_rank: dict[int, list[int]] = defaultdict(list)
        ranks, numbers = _flatten(self.healthy)
        chosen = asked[ranks]
        for rank, number in zip(ranks[chosen].tolist(), numbers[chosen].tolist(), strict=True):
            by_rank[rank].append(number)
        return by_rank


def observe(topology: Topology, observations: Iterable[Any]) -> Observed:
    """Sort observations into slow, healthy and ignored; see `localize.localize` for the rules.

    Raises:
        ScoutError: an unknown kind, an empty group, a rank outside the world or given twice.
    """
    read = [_read(topology, observation) for observation in observations]
    ignored: list[tuple[Observation, str]] = []
    seen: dict[tuple[tuple[int, ...], str], Observation | None] = {}
    for observation, complete in zip(read, _whole(topology, read), strict=True):
        ranks, kind, slow = observation
        if slow is None or not complete:
            ignored.append((observation, NOT_JUDGED if slow is None else INCOMPLETE))
        elif len(ranks) == 1:
            ignored.append((observation, "a group of 1 does not communicate"))
        elif seen.setdefault((ranks, kind), observation) != observation:
            seen[ranks, kind] = None
    by_members: dict[tuple[int, ...], list[Observation]] = defaultdict(list)
    for (ranks, kind), same in seen.items():
        if same is None:
            ignored.append((Observation(ranks, kind, None), "observed as slow and as not slow"))
        else:
            by_members[ranks].append(same)
    accusing = [those for g in by_members.values() if (those := tuple(o for o in g if o.slow))]
    healthy = [o for those in by_members.values() if not any(o.slow for o in those) for o in those]
    groups = tuple(_group(topology, slow, cleared) for slow, cleared in _cleared(accusing, healthy))
    return Observed(topology, groups, tuple(healthy), tuple(ignored))


def _read(topology: Topology, observation: Any) -> Observation:
    ranks, kind, slow = observation
    axis = KINDS.get(kind, kind)
    members = tuple(sorted(int(rank) for rank in ranks))
    if len(axis) != 1 or axis not in AXES:
        known = ", ".join([*AXES, *KINDS])
        raise ScoutError(f"group {members} has kind {kind!r}; known kinds are {known}")
    if not members:
        raise ScoutError(f"an observed group of kind {kind!r} has no ranks; give its members")
    if members[0] < 0 or members[-1] >= topology.world_size or len(set(members)) < len(members):
        raise ScoutError(
            f"group {members} of kind {kind!r}: each member must be one of the ranks "
            f"0..{topology.world_size - 1}, once"
        )
    return Observation(members, axis, None if slow is None else bool(slow))


def _group(topology: Topology, slow: tuple[Observation, ...], cleared: set[int]) -> Group:
    members = frozenset(slow[0].ranks)
    hosts = [topology.hosts[rank] for rank in slow[0].ranks]
    places = frozenset(h or f"rank {rank}" for h, rank in zip(hosts, slow[0].ranks, strict=True))
    inside = len(places) == 1 if all(hosts) else all(o.kind == INSIDE for o in slow)
    return Group(slow, members, members - cleared, places, inside)


def _cleared(
    accusing: Sequence[tuple[Observation, ...]], healthy: Sequence[Observation]
) -> Iterator[tuple[tuple[Observation, ...], set[int]]]:
    """Pair each slow group with the ranks that a healthy group of the same kind clears."""
    clear: dict[str, set[int]] = defaultdict(set)
    accused = {rank for slow in accusing for rank in slow[0].ranks}
    for observation in healthy:
        if not accused.isdisjoint(observation.ranks):
            clear[observation.kind].update(observation.ranks)
    for slow in accusing:
        yield slow, set.intersection(*(clear[o.kind] for o in slow))


def _flatten(observations: Sequence[Observation]) -> tuple[Ranks, Ranks]:
    """All members one after another, and the number of the observation each belongs to."""
    sizes = [len(o.ranks) for o in observations]
    ranks = np.fromiter((r for o in observations for r in o.ranks), np.int64, sum(sizes))
    return ranks, np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def _whole(topology: Topology, observations: Sequence[Observation]) -> list[bool]:
    """False for a proper part of an axis group: some member did not report."""
    whole = np.ones(len(observations), dtype=bool)
    for axis in sorted({o.kind for o in observations} - {PAIRWISE}):
        chosen = np.array([i for i, o in enumerate(observations) if o.kind == axis])
        ranks, numbers = _flatten([observations[i] for i in chosen])
        sizes = np.bincount(numbers)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        part, complete = np.zeros(len(chosen), dtype=bool), np.zeros(len(chosen), dtype=bool)
        for layout in topology.layouts:
            key, size = _axis_keys(topology.layout(layout), axis)
            along = np.minimum.reduceat(key[ranks], starts) == np.maximum.reduceat(
                key[ranks], starts
            )
            full = size[ranks[starts]]
            part |= along & (sizes < full)
            complete |= along & (sizes == full)
        whole[chosen] = complete | ~part
    return [bool(value) for value in whole]


def _axis_keys(layout: tuple[Coordinate, ...], axis: str) -> tuple[Ranks, Ranks]:
    """Number of the axis group of each rank, and that group's size."""
    places = np.array(layout, dtype=np.int64)
    places[:, AXES.index(axis)] = 0
    weights = np.cumprod([1, *(places.max(axis=0)[:-1] + 1)])
    _, key, sizes = np.unique(places @ weights, return_inverse=True, return_counts=True)
    return key, sizes[key]
