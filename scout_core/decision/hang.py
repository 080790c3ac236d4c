"""The hang verdict: which ranks hold a stopped job up, and which only wait for them.

Blame has a direction, so a vote alone is not enough: across overlapping groups a
majority ties or accuses victims. The rules, in the order in which they decide:

1. A process that is dead, stopped or out of reach is a fault by itself.
2. (A) A device that does not finish a collective which another member has completed is stuck.
3. Members that entered different operations diverged: C3 Exact on fingerprints names the
   minority.
4. (B) Ranks wait for the members that have not entered their operation. Following the waits over
   all groups and channels, only a rank that waits for nobody is a culprit; the ranks on the way
   are victims.
5. Waits that lead in a circle are a cycle; waits among ranks that all joined are a group stall.
6. Where no operation is known at all: C3 Exact on the progress coordinates.

Missing evidence is never agreement and never proof of absence: waits that end at a rank of which
nothing is known blame nobody. Pure: no clock, no file, no process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from scout_core.decision.coordinates import by_coordinates
from scout_core.decision.deadlock import Core, find_cores, reaching
from scout_core.decision.divergence import find_divergences
from scout_core.decision.hang_diagnosis import Finding, HangDiagnosis, HangKind, Rule
from scout_core.decision.hang_explain import Explainer
from scout_core.decision.hang_incident import to_incident
from scout_core.decision.snapshots import (
    Channel,
    GroupState,
    Operation,
    OperationState,
    Phase,
    ProcessState,
    RankSnapshot,
)
from scout_core.decision.views import (
    GroupView,
    group_views,
    held_by_device,
    oldest_outstanding,
    pair_views,
    stuck_on_device,
)
from scout_core.decision.waits import GONE, WaitGraph, build_graph
from scout_core.errors import ScoutError

__all__ = [
    "Channel",
    "Finding",
    "GroupState",
    "HangDiagnosis",
    "HangKind",
    "Operation",
    "OperationState",
    "Phase",
    "ProcessState",
    "RankSnapshot",
    "Rule",
    "diagnose",
    "to_incident",
]

KILLED = frozenset({-4, -7, -8, -9, -11})
"""Exit codes of SIGILL, SIGBUS, SIGFPE, SIGKILL, SIGSEGV: nobody else's error does that."""
TEARDOWN_S = 5.0
"""A launcher may kill the other ranks this long after the first one died."""


def diagnose(snapshots: Iterable[RankSnapshot]) -> HangDiagnosis:
    """Name the ranks that hold a stopped job up.

    Args:
        snapshots: one per rank, in any order; ranks may be left out. Taken when the job has made
            no visible progress for longer than it may: a single snapshot cannot tell waiting
            from working.

    Raises:
        ScoutError: two snapshots of the same rank.
    """
    return _Case(_in_rank_order(snapshots)).diagnosis()


class _Case:
    """The evidence of one hang, and what was concluded from it so far."""

    def __init__(self, snapshots: list[RankSnapshot]) -> None:
        self.seen = {s.rank: s for s in snapshots if not s.missing}
        present = list(self.seen.values())
        self.groups = group_views(present)
        pairs = pair_views(present)
        self.divergences = find_divergences(self.groups, pairs)
        self.stuck = {
            rank: proof
            for rank, proof in stuck_on_device(self.groups).items()
            if not self._diverged_before(*proof)
        }
        self.held = held_by_device(self.groups, pairs)
        self.kinds = self._faults_by_themselves()
        self.graph = build_graph(snapshots, self.groups, pairs, self._released())
        self.excused: set[int] = set()
        self.unseen = set(self.graph.unseen) - {-1}
        self.cores: list[Core] = []

    def diagnosis(self) -> HangDiagnosis:
        """Follow the waits to their ends and say what they mean."""
        self._blame_sinks()
        self._find_cores()
        culprits = sorted(self.kinds)
        kind = self._kind()
        if kind is HangKind.NONE and not self.excused:
            return by_coordinates(list(self.seen.values()))
        explainer = Explainer(self.seen, self.groups, self.graph, self.stuck, self.divergences)
        return explainer.diagnosis(
            kind=kind,
            kinds={rank: self.kinds[rank] for rank in culprits},
            victims=self._victims(),
            cores=self.cores,
            unseen=sorted(self.unseen),
        )

    def _diverged_before(self, view: GroupView, operation: Operation) -> bool:
        """After members took different paths, equal numbers are no longer equal operations."""
        return any(
            d.place is view and d.sequence is not None and d.sequence <= operation.sequence
            for d in self.divergences
        )

    def _faults_by_themselves(self) -> dict[int, HangKind]:
        """Rules 1 to 3; a rank keeps the first kind it gets."""
        kinds = {
            rank: HangKind.PROCESS_DEAD
            for rank in _first_dead(self.seen.values())
            if not self._died_of_divergence(rank)
        }
        for rank, snapshot in self.seen.items():
            if snapshot.state is ProcessState.UNREACHABLE:
                kinds[rank] = HangKind.NODE_UNREACHABLE
            elif snapshot.state is ProcessState.STOPPED and not snapshot.within_limit:
                kinds[rank] = HangKind.PROCESS_STOPPED
        for rank in self.stuck:
            kinds.setdefault(rank, HangKind.GPU_STUCK)
        for divergence in self.divergences:
            for rank in divergence.culprits:
                kinds.setdefault(rank, HangKind.MISMATCH)
        return kinds

    def _died_of_divergence(self, rank: int) -> bool:
        """Some libraries abort a process, often an innocent one, when operations do not fit."""
        inside = any(rank in divergence.ranks for divergence in self.divergences)
        return inside and self.seen[rank].exit_code not in KILLED

    def _released(self) -> set[int]:
        """Ranks whose outstanding operations are not what holds them up."""
        return set(self.kinds) | {
            rank
            for rank, s in self.seen.items()
            if s.state in GONE
            or s.state is ProcessState.EXITED
            or s.phase is Phase.FINISHED
            or s.blocked is False
        }

    def _blame_sinks(self) -> None:
        """Rule 4: of those that are waited for, blame the ones that wait for nobody."""
        sinks = _sinks(self.graph) - set(self.kinds)
        dead = {rank for rank in sinks if self.seen[rank].state in GONE}
        self.excused = {rank for rank in sinks - dead if self.seen[rank].within_limit}
        camps = {rank for d in self.divergences for rank in d.ranks}
        diverged = {rank for rank in camps if not self._stands_elsewhere(rank)}
        candidates = sinks - dead - self.excused - diverged
        hidden = {r for r in candidates if self.seen[r].blocked or self._lost_its_waits(r)}
        if len(candidates) > 1:
            hidden |= {rank for rank in candidates if self._may_wait_unseen(rank)}
        candidates -= hidden
        self.unseen |= hidden
        for rank in candidates:
            self.kinds[rank] = self._sink_kind(rank)
        self.excused |= dead  # explained by the death of another rank

    def _lost_its_waits(self, rank: int) -> bool:
        """It may wait like the others, in an operation that was overwritten."""
        s = self.seen[rank]
        return s.truncated and not s.complete and not self._stands_elsewhere(rank)

    def _may_wait_unseen(self, rank: int) -> bool:
        return self.seen[rank].unseen_p2p and not self._stands_elsewhere(rank)

    def _stands_elsewhere(self, rank: int) -> bool:
        """It is known not to wait in a communication call."""
        s = self.seen[rank]
        return s.blocked is False or s.phase is Phase.DATA or s.state is ProcessState.EXITED

    def _sink_kind(self, rank: int) -> HangKind:
        phase = self.seen[rank].phase
        if phase is Phase.DATA:
            return HangKind.INPUT_STALL
        if phase is Phase.CHECKPOINT:
            return HangKind.CHECKPOINT_STALL
        return HangKind.GPU_STUCK if rank in self.held else HangKind.NEVER_ARRIVED

    def _find_cores(self) -> None:
        """Rule 5: what holds itself up, among the ranks that nothing explains so far."""
        camps = {rank for divergence in self.divergences for rank in divergence.ranks}
        explained = (set(self.kinds) | self.excused | camps | self.unseen) & set(self.seen)
        roots = [self.graph.node_of[rank] for rank in sorted(explained)]
        roots += self.graph.unseen.values()
        self.cores = find_cores(self.graph, reaching(self.graph, roots))
        for core in self.cores:
            for rank in core.culprits:
                self.kinds[rank] = HangKind.MISMATCH

    def _victims(self) -> list[int]:
        """Ranks that wait, and are neither at fault nor part of what holds itself up."""
        inside = {rank for core in self.cores if not core.culprits for rank in core.ranks}
        hidden = self.graph.unseen.values()
        ends = [self.graph.node_of[r] for r in (set(self.kinds) | inside) & set(self.seen)]
        ends += [self.graph.node_of[r] for d in self.divergences for r in d.ranks if r in self.seen]
        leads_on = reaching(self.graph, [*ends, *hidden])
        return sorted(
            rank
            for rank in self.graph.waits
            if self.graph.node_of[rank] in leads_on
            and rank not in self.kinds
            and rank not in inside
        )

    def _kind(self) -> HangKind:
        order = list(HangKind)
        if self.kinds:
            return min(self.kinds.values(), key=order.index)
        if self.divergences:
            return HangKind.MISMATCH
        if any(core.cycle for core in self.cores):
            return HangKind.CYCLE
        if any(core.stalled for core in self.cores):
            return HangKind.GROUP_STALL
        missing = (self.unseen or self.graph.unseen) and not self.excused
        return HangKind.EVIDENCE_MISSING if missing or self.cores else HangKind.NONE


def _in_rank_order(snapshots: Iterable[RankSnapshot]) -> list[RankSnapshot]:
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.rank)
    for first, second in itertools.pairwise(ordered):
        if first.rank == second.rank:
            raise ScoutError(
                f"rank {first.rank} has two snapshots ({first.source or 'unnamed'} and "
                f"{second.source or 'unnamed'}); merge them or give one per rank"
            )
    return ordered


def _sinks(graph: WaitGraph) -> set[int]:
    """Ranks that some wait leads to and that wait for nobody."""
    queue = [graph.node_of[rank] for rank in graph.waits]
    reached = set(queue)
    while queue:
        for target in graph.successors[queue.pop()]:
            if target not in reached:
                reached.add(target)
                queue.append(target)
    ends = (node for node in reached if not graph.successors[node] and graph.rank_of[node] >= 0)
    return {graph.rank_of[node] for node in ends}


def _first_dead(snapshots: Iterable[RankSnapshot]) -> list[int]:
    """The dead ranks that did not die of another rank's death.

    The peers of a dead rank get a connection error and end as well, and then the launcher ends
    the rest. A rank that was killed outright did not die of an error. Failing that, a rank that
    was not waiting when it died comes first, and among equals the one that died first.
    """
    dead = [s for s in snapshots if s.state is ProcessState.DEAD]
    first = max((_age(s) for s in dead), default=0.0)
    killed = [s.rank for s in dead if s.exit_code in KILLED and _age(s) >= first - TEARDOWN_S]
    if killed:
        return killed
    pool = [s for s in dead if not _waits(s)] or dead
    first = max((_age(s) for s in pool), default=0.0)
    return [s.rank for s in pool if _age(s) >= first]


def _age(snapshot: RankSnapshot) -> float:
    return math.inf if snapshot.state_age_s is None else snapshot.state_age_s


def _waits(snapshot: RankSnapshot) -> bool:
    entered: list[GroupState | Channel] = [*snapshot.groups, *snapshot.channels]
    return any(oldest_outstanding(state) is not None for state in entered)
