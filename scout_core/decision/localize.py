"""From "these groups are slow" to "this machine", or to "no rank".

A slow communication group accuses all its members alike. A rank is in several groups, so the
suspects of independent slow groups intersect: a rank that is left names itself and its machine.
Where they do not intersect, the group itself is the finding: a link inside one machine, or the
network between machines. Many that no machine explains are a cluster-wide cause.

# Note [Hosts]
Where host names are missing, a tensor-parallel group is taken to be inside one machine and every
other group to cross machines, as frameworks place them; a finding then carries no host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scout_core.decision.observed_groups import Group, Observation, Observed, observe
from scout_core.decision.suspects import Fault, find_host_faults, find_rank_faults
from scout_core.decision.topology import Topology

__all__ = ["Conclusion", "Diagnosis", "Finding", "Ignored", "Observation", "localize"]

Conclusion = Literal["machine", "link", "network", "cluster"]

MANY = 3  # weak findings on as many hosts are one cluster-wide cause
BY_CHANCE = 0.5  # expected ranks in so many slow groups when the slow groups were drawn at random


class Ignored(NamedTuple):
    """A group that gave no evidence, and why."""

    observation: Observation
    why: str


@dataclass(frozen=True)
class Finding:
    """One separate fault. `rank` is set only when the conclusion is "machine"."""

    conclusion: Conclusion
    rank: int | None
    """Global rank; None when no single rank stands out."""
    host: str
    """Empty when it is not known, or when no host is accused."""
    suspects: tuple[int, ...]
    """Global ranks that the evidence cannot tell apart, ascending."""
    supporting: tuple[Observation, ...]
    """The slow groups that this finding explains."""
    contradicting: tuple[Observation, ...]
    """Groups with a suspect as a member that were not slow."""
    resource: str
    """Real name (GPU UUID, NIC) of the accused, from the caller's map; else empty."""
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything one round of observations says."""

    findings: tuple[Finding, ...]
    ignored: tuple[Ignored, ...] = ()

    @property
    def healthy(self) -> bool:
        """Nothing was found."""
        return not self.findings


def localize(
    topology: Topology,
    observations: Iterable[Observation | tuple[Sequence[int], str, bool | None]],
    *,
    compute_stragglers: Collection[int] = (),
    resources: Mapping[int | str, str] | None = None,
) -> Diagnosis:
    """Say which ranks, machines, links or networks explain the slow groups.

    Args:
        topology: addresses and hosts of all ranks.
        observations: (ranks, kind, slow) per timed group: global ranks; an axis letter of
            "dstpce" or "fsdp", "tp" and the like; whether it was slow, None when a member did not
            report. Groups of the same ranks count once. Order does not matter.
        compute_stragglers: global ranks known to compute slowly. They make their groups late, so
            those groups say nothing about communication.
        resources: real names by global rank or by host name.

    Departs from the paper in what counts as independent (different members), in exoneration (a
    healthy group of the same kind clears the members it shares with a slow one) and in separate
    faults (each gets a finding of its own).

    Raises:
        ScoutError: an unknown kind, a group that is empty, or a rank outside the world.
    """
    observed = observe(topology, observations)
    computing = frozenset(compute_stragglers)
    slow = [group for group in observed.slow if not group.members & computing]
    late = [group for group in observed.slow if group.members & computing]
    ignored = [Ignored(*pair) for pair in observed.ignored]
    ignored += [
        Ignored(o, "a member computes slowly") for group in late for o in group.observations
    ]
    hosts = topology.hosts
    faults, rest = find_rank_faults(slow, observed.healthy_groups_of, hosts)
    on_hosts, rest = find_host_faults(rest, observed.healthy_across, hosts)
    case = _Case(topology, observed, resources or {})
    findings = case.findings([*faults, *on_hosts], _connected(rest))
    return Diagnosis(findings, tuple(ignored))


@dataclass(frozen=True)
class _Case:
    """What the conclusions are drawn from."""

    topology: Topology
    observed: Observed
    resources: Mapping[int | str, str]

    def findings(
        self, faults: Sequence[Fault], knots: Sequence[Sequence[Group]]
    ) -> tuple[Finding, ...]:
        """Conclude, and fold what chance or a common cause explains into one cluster finding."""
        machines = [(self._machine(fault), self._by_chance(fault)) for fault in faults]
        weak = [finding for finding, chance in machines if chance]
        weak += [self._no_rank(knot) for knot in knots]
        strong = [finding for finding, chance in machines if not chance]
        if self._common_cause(weak):
            weak = [self._cluster(weak)]
        found = [*strong, *weak]
        return tuple(sorted(found, key=lambda f: (f.suspects, f.conclusion)))

    def _machine(self, fault: Fault) -> Finding:
        rank = fault.ranks[0] if len(fault.ranks) == 1 else None
        supporting = _observations(fault.groups)
        kinds = " and ".join(sorted({o.kind for o in supporting}))
        who = f"rank {rank}" if rank is not None else f"ranks {_few(fault.ranks)}"
        where = f" on {fault.host}" if fault.host else ""
        why = (
            f"{who}{where} is what {len(fault.groups)} independent slow groups "
            f"({kinds}) have in common"
        )
        against = self.observed.healthy_with(fault.ranks)
        name = self.resources.get(fault.host, "")
        name = self.resources.get(rank, name) if rank is not None else name
        return Finding("machine", rank, fault.host, fault.ranks, supporting, against, name, why)

    def _no_rank(self, groups: Sequence[Group]) -> Finding:
        """Slow groups that share no single rank or machine with another kind of evidence."""
        members = _members(groups)
        supporting, against = _observations(groups), self.observed.healthy_with(members)
        places = frozenset.intersection(*(g.places for g in groups))
        if all(g.inside for g in groups):
            hosts = {self.topology.hosts[rank] for rank in members}
            host = hosts.pop() if len(hosts) == 1 else ""
            why = (
                f"slow inside {host or 'a machine'}; no slow group across machines has its members"
            )
            name = self.resources.get(host, "")
            return Finding("link", None, host, members, supporting, against, name, why)
        if places or len(groups) < MANY:
            why = "slow across machines; no slow group inside a machine has its members"
            return Finding("network", None, "", members, supporting, against, "", why)
        return self._cluster([Finding("network", None, "", members, supporting, against, "", "")])

    def _cluster(self, findings: Sequence[Finding]) -> Finding:
        supporting = {o: None for finding in findings for o in finding.supporting}
        members = tuple(sorted({rank for o in supporting for rank in o.ranks}))
        against = self.observed.healthy_with(members)
        hosts = len({self.topology.hosts[rank] for rank in members} - {""})
        where = f" on {hosts} hosts" if hosts else ""
        why = f"{len(supporting)} slow groups{where}, and no one machine explains them"
        return Finding("cluster", None, "", members, tuple(supporting), against, "", why)

    def _common_cause(self, weak: Sequence[Finding]) -> bool:
        """Whether too much is slow for separate faults, or nothing healthy is left beside it."""
        conclusions = {finding.conclusion for finding in weak}
        if conclusions <= {"cluster"}:
            return False
        hosts = self.topology.hosts
        everywhere = set(_places(hosts, range(len(hosts))))
        touched = {place for f in weak for place in _places(hosts, f.suspects)}
        accused = {
            place for f in weak if f.conclusion == "machine" for place in _places(hosts, f.suspects)
        }
        if len(everywhere) == 1:
            return any(len(finding.suspects) == len(hosts) for finding in weak)
        return (
            "cluster" in conclusions
            or 2 * len(accused) > len(everywhere)
            or (len(weak) >= MANY and len(touched) >= min(MANY, len(everywhere)))
        )

    def _by_chance(self, fault: Fault) -> bool:
        """Whether slow groups drawn at random would meet in some rank as often as these do."""
        expected = min(
            math.prod(
                self.observed.slow_fraction(g.kind) for g in fault.groups if rank in g.members
            )
            for rank in fault.ranks
        )
        return self.topology.world_size * expected >= BY_CHANCE


def _connected(groups: Sequence[Group]) -> list[list[Group]]:
    """Sort groups into knots that share places."""
    parent = list(range(len(groups)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, group in enumerate(groups):
        for place in group.places:
            parent[root(i)] = root(first.setdefault(place, i))
    knots: dict[int, list[Group]] = defaultdict(list)
    for i, group in enumerate(groups):
        knots[root(i)].append(group)
    return list(knots.values())


def _observations(groups: Iterable[Group]) -> tuple[Observation, ...]:
    return tuple(o for group in groups for o in group.observations)


def _members(groups: Iterable[Group]) -> tuple[int, ...]:
    return tuple(sorted({rank for group in groups for rank in group.members}))


def _places(hosts: Sequence[str], ranks: Iterable[int]) -> list[str]:
    return [hosts[rank] or f"rank {rank}" for rank in ranks]


def _few(ranks: Sequence[int], most: int = 8) -> str:
    names = ", ".join(str(rank) for rank in ranks[:most])
    return names if len(ranks) <= most else f"{names} and {len(ranks) - most} more"
