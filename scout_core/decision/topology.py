"""Who does the same work: logical addresses, peer groups and what they can and cannot show.

Every rank has an address r = (d, s, t, p, c, e). t, p, c and e say WHAT work a rank
has; only d and s count copies of the same work. Dense layers and expert layers are laid out on
different grids, so a job has two layouts; they are equal when there are no experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from scout_core.errors import ScoutError

AXES = "dstpce"
MIN_PEERS = 3  # 2 detect but cannot attribute; 1 has nothing to compare with

LayoutName = Literal["dense", "expert"]
GroupKind = Literal["replica", "shard", "widened", "none"]
Ability = Literal["attribute", "detect", "none"]


class Coordinate(NamedTuple):
    """Logical address of a rank; a missing axis is 0."""

    d: int = 0  # data replica
    s: int = 0  # FSDP state shard
    t: int = 0  # tensor-parallel position
    p: int = 0  # pipeline stage
    c: int = 0  # context-parallel position
    e: int = 0  # expert partition

    @property
    def work(self) -> tuple[int, int, int, int]:
        """(t, p, c, e): equal for ranks that do the same work."""
        return self[2:]


@dataclass(frozen=True)
class PeerGroup:
    """Ranks that run the same computation.

    kind: "replica" (only d differs), "shard" (no data replicas: s differs), "widened" (fewer than
    3 replicas, so d and s differ), "none" (a rank without peers).
    """

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    kind: GroupKind

    @property
    def can(self) -> Ability:
        """What a comparison among these ranks can do."""
        return _ability(len(self.ranks))


@dataclass(frozen=True)
class GroupCoverage:
    """One row of `Topology.coverage()`."""

    layout: LayoutName
    kind: GroupKind
    ranks: tuple[int, ...]
    can: Ability
    why: str


@dataclass(frozen=True)
class Coverage:
    """What can be attributed, only detected, or not seen, and why."""

    groups: tuple[GroupCoverage, ...]
    """Peer groups of replay: compute, gathered parameters, time."""
    state_groups: tuple[GroupCoverage, ...]
    """Replica groups of the state audit: parameters and optimizer state at rest."""

    @property
    def worst(self) -> Ability:
        """The weakest ability of any replay group."""
        order: tuple[Ability, ...] = ("none", "detect", "attribute")
        return min((group.can for group in self.groups), key=order.index)


@dataclass(frozen=True)
class Topology:
    """Addresses and hosts of all ranks of a job; position r belongs to global rank r."""

    dense: tuple[Coordinate, ...]
    expert: tuple[Coordinate, ...]
    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, layout in (("dense", self.dense), ("expert", self.expert)):
            if not layout:
                raise ScoutError(f"topology: {name} layout has no rank; give one per process")
            _refuse_duplicates(name, layout)
        if not len(self.dense) == len(self.expert) == len(self.hosts):
            raise ScoutError(
                f"topology: {len(self.dense)} dense addresses, {len(self.expert)} expert addresses "
                f"and {len(self.hosts)} hosts; each needs one entry per rank"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.dense)

    @property
    def layouts(self) -> tuple[LayoutName, ...]:
        """The layouts that differ: ("dense",) for a job without experts."""
        return ("dense",) if self.dense == self.expert else ("dense", "expert")

    @classmethod
    def from_degrees(
        cls,
        *,
        order: str = AXES,
        hosts: int | Sequence[str] | None = None,
        **degrees: int,
    ) -> Topology:
        """Lay ranks out on a row-major grid.

        Args:
            order: axis letters, outermost first; the last one varies fastest. A letter that is
                left out must have degree 1 and is put in front.
            hosts: ranks per host (hosts are then called host-0, host-1, ...), or one name per
                rank, or None for one unnamed host.
            degrees: size of each axis of "dstpce"; a missing one is 1. An e axis that is given
                here holds e fixed for dense work too, as in the paper's definition; frameworks
                that carve experts out of the data ranks use `from_coordinates`.

        Raises:
            ScoutError: an unknown axis, a degree below 1, an order that repeats a letter or leaves
                out an axis with degree > 1, or hosts that do not divide the ranks.
        """
        for axis, degree in degrees.items():
            if axis not in AXES or len(axis) != 1:
                raise ScoutError(
                    f"degree {axis}={degree}: there is no axis {axis!r}; "
                    f"the axes are {', '.join(AXES)}"
                )
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ScoutError(f"degree {axis}={degree!r} must be an integer >= 1")
        letters = _full_order(order, degrees)
        sizes = [degrees.get(axis, 1) for axis in letters]
        places = []
        for rank in range(math.prod(sizes)):
            rest, place = rank, {}
            for axis, size in zip(reversed(letters), reversed(sizes), strict=True):
                rest, place[axis] = divmod(rest, size)
            places.append(Coordinate(**place))
        layout = tuple(places)
        return cls(layout, layout, _host_names(hosts, len(layout)))

    @classmethod
    def from_coordinates(
        cls,
        dense: Sequence[Sequence[int]],
        expert: Sequence[Sequence[int]] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> Topology:
        """Use addresses that the caller knows, one per global rank in rank order.

        `expert` defaults to `dense` and `hosts` to one unnamed host.

        Raises:
            ScoutError: lengths differ, an address is not up to six integers >= 0, or two ranks of
                a layout share one.
        """
        layout = _coordinates("dense", dense)
        experts = layout if expert is None else _coordinates("expert", expert)
        return cls(layout, experts, _host_names(hosts, len(layout)))

    def layout(self, name: LayoutName = "dense") -> tuple[Coordinate, ...]:
        """Return the addresses of all ranks for dense or for expert work."""
        if name not in ("dense", "expert"):
            raise ScoutError(f"layout {name!r} does not exist; it is 'dense' or 'expert'")
        return self.dense if name == "dense" else self.expert

    def peer_group(self, rank: int, layout: LayoutName = "dense") -> PeerGroup:
        """Return the ranks that do the same work as `rank`.

        G_rep when there are data replicas, G_shard when there are none; fewer than 3 replicas are
        widened over the shards, which run the same computation after the all-gather.

        Raises:
            ScoutError: the rank is not in the world, or there is no such layout.
        """
        self._check_rank(rank)
        return self._replay_groups(layout)[rank]

    def peer_groups(self, layout: LayoutName = "dense") -> tuple[PeerGroup, ...]:
        """Return every peer group once, ordered by its lowest rank."""
        unique = {group.ranks: group for group in self._replay_groups(layout)}
        return tuple(sorted(unique.values(), key=lambda group: group.ranks))

    def replicas(self, rank: int, layout: LayoutName = "dense") -> tuple[int, ...]:
        """Return the ranks whose state at rest equals that of `rank`: only d differs."""
        self._check_rank(rank)
        return self._along("d", layout)[rank]

    def axis_groups(self, axis: str, layout: LayoutName = "dense") -> tuple[tuple[int, ...], ...]:
        """Return the groups along one axis (all other coordinates equal), each ascending.

        Raises:
            ScoutError: there is no such axis.
        """
        if axis not in tuple(AXES):
            raise ScoutError(f"axis {axis!r} does not exist; the axes are {', '.join(AXES)}")
        return tuple(sorted(set(self._along(axis, layout))))

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that exchange data inside a layer, each ascending; every rank is in one.

        They are the tensor, context and expert parallel partners of one replica and stage,
        connected over both layouts. One of them makes the others' results wrong.
        """
        row_of: dict[int, set[int]] = {rank: {rank} for rank in range(self.world_size)}
        for layout in (self.dense, self.expert):
            for partners in set(_members([(place.d, place.s, place.p) for place in layout])):
                joined = set().union(*(row_of[rank] for rank in partners))
                row_of |= dict.fromkeys(joined, joined)
        return tuple(sorted({tuple(sorted(row)) for row in row_of.values()}))

    def coverage(self) -> Coverage:
        """Say what each group can do: attribute, detect or nothing, and why."""
        return Coverage(
            groups=tuple(
                GroupCoverage(name, group.kind, group.ranks, group.can, _why(group))
                for name in self.layouts
                for group in self.peer_groups(name)
            ),
            state_groups=tuple(
                GroupCoverage(
                    name,
                    "replica" if len(ranks) > 1 else "none",
                    ranks,
                    _ability(len(ranks)),
                    _why_state(ranks),
                )
                for name in self.layouts
                for ranks in self.axis_groups("d", name)
            ),
        )

    def _replay_groups(self, layout: LayoutName) -> list[PeerGroup]:
        """One peer group per rank; the layout's name is checked first."""
        return self._dense_groups if self.layout(layout) is self.dense else self._expert_groups

    @cached_property
    def _dense_groups(self) -> list[PeerGroup]:
        return _replay_groups(self.dense)

    @cached_property
    def _expert_groups(self) -> list[PeerGroup]:
        return _replay_groups(self.expert)

    def _along(self, axis: str, layout: LayoutName) -> list[tuple[int, ...]]:
        fixed = [i for i, letter in enumerate(AXES) if letter != axis]
        return _members([tuple(place[i] for i in fixed) for place in self.layout(layout)])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ScoutError(
                f"rank {rank} is not in a world of {self.world_size}; "
                f"ranks are 0..{self.world_size - 1}"
            )


def _coordinates(name: str, places: Sequence[Sequence[int]]) -> tuple[Coordinate, ...]:
    for rank, place in enumerate(places):
        integers = all(isinstance(part, int) and part >= 0 for part in place)
        if len(place) > len(AXES) or not integers:
            raise ScoutError(
                f"topology: the {name} address {place!r} of rank {rank} must be up to "
                f"{len(AXES)} integers >= 0, in the order {', '.join(AXES)}"
            )
    return tuple(Coordinate(*place) for place in places)


def _replay_groups(layout: tuple[Coordinate, ...]) -> list[PeerGroup]:
    replicas = _members([(place.s, *place.work) for place in layout])
    copies = _members([place.work for place in layout])
    groups = []
    for rank in range(len(layout)):
        rep, wide = replicas[rank], copies[rank]
        if len(wide) == 1:
            groups.append(PeerGroup(wide, "none"))
        elif len(rep) == 1:
            groups.append(PeerGroup(wide, "shard"))
        elif len(rep) < MIN_PEERS and len(wide) > len(rep):
            groups.append(PeerGroup(wide, "widened"))
        else:
            groups.append(PeerGroup(rep, "replica"))
    return groups


def _members(keys: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each rank, all ranks with the same key, ascending."""
    by_key: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, key in enumerate(keys):
        by_key[key].append(rank)
    shared = {key: tuple(ranks) for key, ranks in by_key.items()}
    return [shared[key] for key in keys]


def _ability(size: int) -> Ability:
    if size >= MIN_PEERS:
        return "attribute"
    return "detect" if size == 2 else "none"


def _why(group: PeerGroup) -> str:
    size = len(group.ranks)
    if group.can == "attribute":
        return f"{size} {group.kind} peers: up to {(size - 1) // 2} faulty ranks can be named"
    if group.can == "detect":
        return "2 peers show that they differ, not which one is wrong; 3 are needed to name a rank"
    return "no other rank does this work, so there is nothing to compare with"


def _why_state(ranks: tuple[int, ...]) -> str:
    if len(ranks) >= MIN_PEERS:
        return f"{len(ranks)} replicas hold the same state"
    if len(ranks) == 2:
        return "2 replicas show that they differ, not which one is wrong"
    return "only this rank holds this state: a corrupt shard is gathered alike by all peers"


def _full_order(order: str, degrees: dict[str, int]) -> str:
    if len(set(order)) != len(order) or not set(order) <= set(AXES):
        raise ScoutError(f"order={order!r} must name each axis of {AXES!r} at most once")
    left_out = [axis for axis in AXES if axis not in order]
    wide = [axis for axis in left_out if degrees.get(axis, 1) > 1]
    if wide:
        raise ScoutError(
            f"order={order!r} leaves out {', '.join(wide)}, which has degree > 1; "
            "say where it stands, outermost first"
        )
    return "".join(left_out) + order


def _host_names(hosts: int | Sequence[str] | None, world_size: int) -> tuple[str, ...]:
    if hosts is None:
        return ("",) * world_size
    if isinstance(hosts, int):
        if hosts < 1 or world_size % hosts:
            raise ScoutError(
                f"hosts={hosts} ranks per host does not divide the {world_size} ranks; "
                "give a divisor, or one host name per rank"
            )
        return tuple(f"host-{rank // hosts}" for rank in range(world_size))
    return tuple(hosts)


def _refuse_duplicates(name: str, layout: tuple[Coordinate, ...]) -> None:
    first: dict[Coordinate, int] = {}
    for rank, place in enumerate(layout):
        if place in first:
            raise ScoutError(
                f"topology: ranks {first[place]} and {rank} share the {name} address {place}; "
                "every rank needs its own: check the degrees against the world size"
            )
        first[place] = rank
