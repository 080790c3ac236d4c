"""Who explains the slow groups: the rank or machine that independent ones have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scout_core.decision.observed_groups import Group


@dataclass(frozen=True)
class Fault:
    """Ranks on one host that explain at least two independent slow groups."""

    ranks: tuple[int, ...]
    """One when the rank is certain; more when only their machine is."""
    host: str
    groups: tuple[Group, ...]


def find_rank_faults(
    groups: Sequence[Group], healthy_groups_of: Callable[[int], int], hosts: Sequence[str]
) -> tuple[list[Fault], list[Group]]:
    """Explain slow groups by the ranks that most of them share, the clearest rank first.

    Args:
        groups: slow groups.
        healthy_groups_of: number of healthy groups with that global rank as a member.
        hosts: by global rank; empty where unknown.

    Returns:
        Faults, one per known host or rank, and the groups that are left unexplained. A rank that
        cannot be told from another one is not named.
    """
    left, undecided = list(groups), list[Group]()
    blamed: dict[int, list[Group]] = {}
    while True:
        accusers = _accusers(left)
        most = max((len(those) for those in accusers.values()), default=0)
        if most < 2:
            break
        tops = [rank for rank, those in accusers.items() if len(those) == most]
        done = set[int]()
        for knot in _knots(tops, accusers):
            named = _decide(knot, accusers, healthy_groups_of, hosts)
            blamed |= {rank: accusers[rank] for rank in named}
            done |= named or set(knot)
        undecided += [g for g in left if g.suspects & done and not g.suspects & blamed.keys()]
        left = [group for group in left if not group.suspects & done]
    return _merge_by_host(blamed, hosts), left + undecided


def find_host_faults(
    groups: Sequence[Group],
    healthy_across: Callable[[str, frozenset[str]], int],
    hosts: Sequence[str],
) -> tuple[list[Fault], list[Group]]:
    """Explain what is left by hosts: one that several different slow groups have in common.

    A host is named when it alone has the most slow groups, these do not join it to the same other
    hosts every time, and most of its groups of these kinds are slow.

    Args:
        groups: slow groups that no rank explains.
        healthy_across: number of healthy groups of these kinds that cross the host's border.
        hosts: by global rank; empty where unknown.
    """
    left, faults, known = list(groups), list[Fault](), set(hosts) - {""}
    while True:
        count = Counter(place for group in left for place in group.places)
        (host, most), (_, second) = [*count.most_common(2), ("", 0), ("", 0)][:2]
        chosen = tuple(group for group in left if host in group.places)
        if most < 2 or most == second or len({group.places for group in chosen}) < 2:
            return faults, left
        crossing = [group.kind for group in chosen if not group.inside]
        if host not in known or healthy_across(host, frozenset(crossing)) > len(crossing):
            return faults, left
        members = {rank for group in chosen for rank in group.members if hosts[rank] == host}
        faults.append(Fault(tuple(sorted(members)), host, chosen))
        left = [group for group in left if host not in group.places]


def _accusers(groups: Iterable[Group]) -> dict[int, list[Group]]:
    accusers: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        for rank in group.suspects:
            accusers[rank].append(group)
    return accusers


def _knots(ranks: Iterable[int], accusers: dict[int, list[Group]]) -> list[list[int]]:
    """Sort ranks into sets that share accusing groups, directly or through others."""
    waiting, knots = set(ranks), []
    while waiting:
        knot, frontier = [], [waiting.pop()]
        while frontier:
            rank = frontier.pop()
            knot.append(rank)
            near = {r for group in accusers[rank] for r in group.suspects} & waiting
            waiting -= near
            frontier += near
        knots.append(sorted(knot))
    return knots


def _decide(
    knot: Sequence[int],
    accusers: dict[int, list[Group]],
    healthy_groups_of: Callable[[int], int],
    hosts: Sequence[str],
) -> set[int]:
    """Choose whom to name among ranks that as many slow groups accuse; nobody when in doubt."""
    fewest = min(healthy_groups_of(rank) for rank in knot)
    clearest = {rank for rank in knot if healthy_groups_of(rank) == fewest}
    machines = {hosts[rank] for rank in clearest}
    if len(clearest) == 1 or (len(machines) == 1 and "" not in machines):
        return clearest
    if all(_alone(rank, clearest, accusers[rank], healthy_groups_of) for rank in clearest):
        return clearest
    if "" not in machines and all(
        any(group.inside for group in accusers[rank]) for rank in clearest
    ):
        return clearest
    return set()


def _alone(
    rank: int,
    rivals: set[int],
    groups: Iterable[Group],
    healthy_groups_of: Callable[[int], int],
) -> bool:
    """Whether some slow group has no other member that could be the cause."""
    return any(
        all(r not in rivals and healthy_groups_of(r) for r in group.suspects - {rank})
        for group in groups
    )


def _merge_by_host(blamed: dict[int, list[Group]], hosts: Sequence[str]) -> list[Fault]:
    """Two ranks on one host are that host."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(blamed):
        by_host[hosts[rank] or f"rank {rank}"].append(rank)
    faults = []
    for ranks in by_host.values():
        groups = {id(group): group for rank in ranks for group in blamed[rank]}
        faults.append(Fault(tuple(ranks), hosts[ranks[0]], tuple(groups.values())))
    return faults
