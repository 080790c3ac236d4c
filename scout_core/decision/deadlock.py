"""What is left when following the waits ends nowhere: ranks that hold each other up.

Either everybody has joined an operation and it does not complete (transport or hardware), or
ranks wait for each other in a circle (order of operations). A circle names nobody, except where
a strict majority of a group waits together and the rest took another path (C3 Exact).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from scout_core.decision.consensus import Status, exact
from scout_core.decision.evidence import Fingerprint, Missing
from scout_core.decision.views import GroupView, PairView
from scout_core.decision.waits import Wait, WaitGraph, WaitKind

Successors = Sequence[Sequence[int]]


class Core(NamedTuple):
    """Ranks that hold each other up, and wait for nobody else."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    cycle: tuple[Wait, ...]
    """Waits that form a circle, each for the rank of the next; empty when there is none."""
    stalled: GroupView | PairView | None
    """The group or channel that everybody has joined; None when it cannot be told either."""
    culprits: tuple[int, ...]
    """A minority that took another path, ascending; usually empty."""


def reaching(graph: WaitGraph, roots: Iterable[int]) -> set[int]:
    """Return the nodes from which some root can be reached, roots included."""
    before: list[list[int]] = [[] for _ in graph.successors]
    for node, targets in enumerate(graph.successors):
        for target in targets:
            before[target].append(node)
    found = set(roots)
    queue = deque(found)
    while queue:
        for node in before[queue.popleft()]:
            if node not in found:
                found.add(node)
                queue.append(node)
    return found


def find_cores(graph: WaitGraph, resolved: Collection[int]) -> list[Core]:
    """Return the innermost sets of ranks that hold each other up.

    Args:
        resolved: nodes that are already explained; no other node leads to one of them.
    """
    open_nodes = [
        node
        for node, rank in enumerate(graph.rank_of)
        if rank >= 0 and node not in resolved and graph.successors[node]
    ]
    if not open_nodes:
        return []
    components = _components(graph.successors, open_nodes)
    place = {node: i for i, component in enumerate(components) for node in component}
    cores = []
    for i, component in enumerate(components):
        ranks = tuple(sorted(graph.rank_of[n] for n in component if graph.rank_of[n] >= 0))
        leaves = any(place[t] != i for node in component for t in graph.successors[node])
        if ranks and not leaves:
            cores.append(_core(graph, ranks))
    return cores


def _core(graph: WaitGraph, ranks: tuple[int, ...]) -> Core:
    waits = [wait for rank in ranks for wait in graph.waits[rank]]
    absent = [wait for wait in waits if wait.kind is WaitKind.ABSENT]
    blocking = _without(graph, absent)
    circles = _circles(graph, blocking, ranks)
    if not circles:
        return Core(ranks, (), _stalled(waits), ())
    culprits = _other_path(graph, ranks, absent)
    if culprits:
        return Core(ranks, (), None, culprits)
    return Core(tuple(circles[0]), _circle(graph, blocking, absent, circles[0]), None, ())


def _without(graph: WaitGraph, kept: Iterable[Wait]) -> Successors:
    """The edges of the graph with no rank's waits but those that are kept."""
    successors: list[Sequence[int]] = [
        targets if rank < 0 else ()
        for targets, rank in zip(graph.successors, graph.rank_of, strict=True)
    ]
    for wait in kept:
        node = graph.node_of[wait.rank]
        successors[node] = [*successors[node], *wait.targets]
    return successors


def _circles(graph: WaitGraph, successors: Successors, ranks: Iterable[int]) -> list[list[int]]:
    """Sets of at least two ranks that wait for each other, each ascending."""
    components = _components(successors, [graph.node_of[rank] for rank in ranks])
    found = [sorted(graph.rank_of[n] for n in c if graph.rank_of[n] >= 0) for c in components]
    return sorted(ranks for ranks in found if len(ranks) > 1)


def _circle(
    graph: WaitGraph, successors: Successors, waits: Iterable[Wait], ranks: Sequence[int]
) -> tuple[Wait, ...]:
    """A shortest circle of waits through the lowest rank."""
    start = graph.node_of[ranks[0]]
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue and start not in came_from:
        node = queue.popleft()
        for target in sorted(successors[node], key=lambda n: (graph.rank_of[n], n)):
            if target not in came_from:
                came_from[target] = node
                queue.append(target)
    path = [came_from[start]]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    path.reverse()
    by_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, []).append(wait)
    steps = [(node, after) for node, after in zip(path, [*path[1:], start], strict=True)]
    return tuple(
        next(wait for wait in by_rank[graph.rank_of[node]] if after in wait.targets)
        for node, after in steps
        if graph.rank_of[node] >= 0
    )


def _other_path(graph: WaitGraph, ranks: Sequence[int], absent: Sequence[Wait]) -> tuple[int, ...]:
    """The ranks that took another path than the strict majority of a group they belong to.

    Only when letting them go would free everybody, none of them waits for another of them, and no
    other group votes for others: otherwise it cannot be told who left the path.
    """
    places = {id(w.place): w.place for w in absent if isinstance(w.place, GroupView)}
    votes = {frozenset(_outliers(graph, view)) for view in places.values()}
    found = [culprits for culprits in votes if _frees_all(graph, ranks, absent, culprits)]
    return tuple(sorted(found[0])) if len(found) == 1 else ()


def _frees_all(
    graph: WaitGraph, ranks: Sequence[int], absent: Sequence[Wait], culprits: frozenset[int]
) -> bool:
    if not culprits or not culprits <= set(ranks):
        return False
    own = [wait for wait in absent if wait.rank in culprits]
    others = [wait for wait in absent if wait.rank not in culprits]
    left = _circles(graph, _without(graph, others), ranks)
    return not left and not _meets(graph, own, culprits)


def _outliers(graph: WaitGraph, view: GroupView) -> set[int]:
    values: list[Hashable] = []
    for rank in view.ranks:
        waits = graph.waits.get(rank, ())
        here = next((wait for wait in waits if wait.place is view), None)
        wait = here or next(iter(waits), None)
        if wait is None:
            values.append(Missing("waits for nobody"))
        else:
            name = wait.operation.name if wait.operation else ""
            values.append(Fingerprint(wait.place.key, wait.sequence, name, ""))
    verdict = exact(values)
    if verdict.status is not Status.ATTRIBUTED:
        return set()
    return {view.ranks[position] for position in verdict.outliers}


def _meets(graph: WaitGraph, waits: Iterable[Wait], ranks: Collection[int]) -> bool:
    """Tell whether one of the waits is directly for one of the ranks."""
    queue = [node for wait in waits for node in wait.targets]
    seen: set[int] = set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if graph.rank_of[node] in ranks:
            return True
        if graph.rank_of[node] < 0:
            queue.extend(graph.successors[node])
    return False


def _stalled(waits: Sequence[Wait]) -> GroupView | PairView | None:
    """The joined group that nothing else holds up: its members entered it before anything else."""
    by_rank: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        by_rank[wait.rank].append(wait)
    first: dict[int, list[bool]] = defaultdict(list)
    joined = [wait for wait in waits if wait.kind is WaitKind.JOINED]
    for wait in joined:
        first[id(wait.place)].append(_is_first(wait, by_rank[wait.rank]))
    candidates = [wait.place for wait in joined if all(first[id(wait.place)])]
    return max(candidates, key=lambda place: len(place.ranks), default=None)


def _is_first(wait: Wait, others: Sequence[Wait]) -> bool:
    """Nothing that the rank entered before is outstanding, nor may be."""
    ages = [None if w.operation is None else w.operation.age_s for w in others]
    own = None if wait.operation is None else wait.operation.age_s
    if own is None or None in ages:
        return all(other.kind is WaitKind.JOINED for other in others)
    return own >= max(age for age in ages if age is not None)


def _components(successors: Successors, starts: Iterable[int]) -> list[list[int]]:
    """Strongly connected components reachable from the starts, innermost first."""
    search = _Tarjan(successors)
    for start in starts:
        if start not in search.order:
            search.run(start)
    return search.found


class _Tarjan:
    """Tarjan's search without recursion: chains of waits can be as long as the job is wide."""

    def __init__(self, successors: Successors) -> None:
        self._successors = successors
        self.order: dict[int, int] = {}
        self.found: list[list[int]] = []
        self._low: dict[int, int] = {}
        self._stack: list[int] = []
        self._open: set[int] = set()

    def run(self, start: int) -> None:
        work = [self._enter(start)]
        while work:
            node, targets = work[-1]
            fresh = self._next_unvisited(node, targets)
            if fresh is not None:
                work.append(self._enter(fresh))
                continue
            work.pop()
            if work:
                above = work[-1][0]
                self._low[above] = min(self._low[above], self._low[node])
            if self._low[node] == self.order[node]:
                self._close(node)

    def _enter(self, node: int) -> tuple[int, Iterator[int]]:
        self.order[node] = self._low[node] = len(self.order)
        self._stack.append(node)
        self._open.add(node)
        return node, iter(self._successors[node])

    def _next_unvisited(self, node: int, targets: Iterator[int]) -> int | None:
        for target in targets:
            if target not in self.order:
                return target
            if target in self._open:
                self._low[node] = min(self._low[node], self.order[target])
        return None

    def _close(self, node: int) -> None:
        component: list[int] = []
        while not component or component[-1] != node:
            component.append(self._stack.pop())
        self._open.difference_update(component)
        self.found.append(component)
