"""Which share of what training executed is covered, and by what (beyond the paper).

The catalogue is found for chosen shapes; routing produces others. Each executed row vector is
looked up. One that no representative covers is queued and replayed itself at the next slot. Nothing
that waits, or was not looked up, counts as covered.

A replay speaks for the work executed before it: a fault that was there while training ran is there
at the replay. Work executed after it waits again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scout_core.decision.catalog import Catalog, Observation, Shape, build_catalog, order
from scout_core.errors import ScoutError

Observe = Callable[[Shape], Observation]
"""Says what a shape executes: `GroupedGemm.observation`, or `exact_observation` when unknown."""


class Shares(NamedTuple):
    """Executed work in rows times executions, by what covers it."""

    catalogue: int  # a representative of the rotation executes every path at least as often
    exact: int  # the vector, or one that executes at least as much, was replayed afterwards
    queued: int  # waits for its replay
    skipped: int  # was not looked up: over the limit of look-ups or of the queue

    @property
    def executed(self) -> int:
        """All work, in rows times executions."""
        return sum(self)

    @property
    def not_yet(self) -> int:
        """Work that nothing covers so far."""
        return self.queued + self.skipped

    def __str__(self) -> str:
        whole = max(self.executed, 1)
        parts = (self.catalogue, self.exact, self.not_yet)
        catalogue, exact, not_yet = (f"{100 * part / whole:.2f} %" for part in parts)
        return f"expert work: {catalogue} by catalogue, {exact} by exact replay, {not_yet} not yet"


@dataclass(frozen=True)
class _Waiting:
    observation: Observation
    work: int
    first_step: int
    last_step: int


class PathCoverage:
    """Account for the executed row vectors of one expert projection on one rank.

    Invariant: every executed row is in exactly one of the four shares.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        observe: Observe,
        *,
        lookups_per_step: int | None = None,
        max_waiting: int = 4096,
    ) -> None:
        """Start with nothing executed.

        Args:
            catalog: None when there is no catalogue for this environment; then every vector is
                queued.
            observe: without a model of the kernels pass `exact_observation`: then only admissible
                shapes are covered, and a queued vector stands for itself alone.
            lookups_per_step: look at this many distinct vectors of a step, taking turns; the rest
                is skipped. None looks at all.
            max_waiting: distinct vectors that may wait; further ones are skipped.

        Raises:
            ScoutError: a limit below 1.
        """
        for name, limit in (("lookups_per_step", lookups_per_step), ("max_waiting", max_waiting)):
            if limit is not None and limit < 1:
                raise ScoutError(f"{name}={limit} of PathCoverage must be >= 1")
        self._catalog = catalog
        self._observe = observe
        self._lookups = lookups_per_step
        self._max_waiting = max_waiting
        self._waiting: dict[Shape, _Waiting] = {}
        self._catalogue_work = self._exact_work = self._skipped_work = 0
        self._due: dict[Shape, None] = {}  # representatives not yet replayed in this cycle, in turn
        self._owed: set[Shape] = set()  # vectors that waited when this cycle began
        self._retired: set[Shape] = set()  # cannot be replayed, so they cover nothing
        self._turn = 0
        self.start_cycle()

    @property
    def shares(self) -> Shares:
        """What covers the work executed so far."""
        queued = sum(each.work for each in self._waiting.values())
        return Shares(self._catalogue_work, self._exact_work, queued, self._skipped_work)

    @property
    def queue(self) -> tuple[Shape, ...]:
        """The vectors to replay, oldest first: the fewest whose replays cover all that wait."""
        alike: dict[Hashable, list[Shape]] = {}
        for shape, each in self._waiting.items():
            alike.setdefault(each.observation.fingerprint, []).append(shape)
        oldest: dict[Shape, int] = {}
        for shapes in alike.values():
            oldest |= self._oldest_below(shapes)
        return tuple(sorted(oldest, key=lambda shape: (oldest[shape], order(shape))))

    @property
    def cycle_done(self) -> bool:
        """Whether each representative, and each vector that waited at its start, was replayed.

        This is a full cycle of the checkpoint gate: work executed before the cycle began is
        covered when it ends.
        """
        return not self._due and not self._owed

    @property
    def owes(self) -> bool:
        """Whether a vector still waits that waited when the cycle began."""
        return bool(self._owed)

    def start_cycle(self) -> None:
        """Begin a cycle: every representative is due, and everything that waits now is owed."""
        self._due = {}
        self.refill()
        self.owe()

    def refill(self) -> None:
        """Let the representatives take turns again, once each has had its own."""
        representatives = self._catalog.representatives if self._catalog else ()
        if not self._due:
            self._due = dict.fromkeys(r for r in representatives if r not in self._retired)

    def owe(self) -> None:
        """Owe what waits now, and nothing that comes later."""
        self._owed = set(self._waiting)

    def on_step(self, step: int, shapes: Iterable[Shape]) -> None:
        """Account for the row vectors that one optimizer step executed, one per execution."""
        work: dict[Shape, int] = {}
        for shape in shapes:
            work[shape] = work.get(shape, 0) + _rows(shape)
        looked_at = self._sample(list(work), step)
        for shape, rows in work.items():
            if shape not in looked_at:
                self._skipped_work += rows
            elif self._is_covered(shape):
                self._catalogue_work += rows
            else:
                self._wait(shape, rows, step)

    def skip(self, rows: int) -> None:
        """Account for executed rows whose vectors nobody knows."""
        self._skipped_work += rows

    def plan(self, slots: int, queue: Sequence[Shape] | None = None) -> tuple[Shape, ...]:
        """Return the shapes to replay next, at most `slots`.

        The queue and the representatives take turns, so that neither starves.

        Args:
            queue: what `agree_queue` returned; None takes this rank's own.
        """
        exact, rotation = list(self.queue if queue is None else queue), list(self._due)
        planned: list[Shape] = []
        while len(planned) < slots and (exact or rotation):
            first, second = (rotation, exact) if self._turn % 2 else (exact, rotation)
            planned.append((first or second).pop(0))
            self._turn += 1
        return tuple(planned)

    def on_clean_replay(self, shape: Shape, step: int) -> None:
        """Note that a shape was replayed and all peers agreed.

        Args:
            step: the last optimizer step that was executed before the replay.
        """
        self._due.pop(shape, None)
        replayed = build_catalog([self._observe(shape)])
        done = [
            waiting
            for waiting, each in self._waiting.items()
            if each.last_step <= step and replayed.covering(each.observation) is not None
        ]
        for waiting in done:
            self._exact_work += self._waiting.pop(waiting).work
            self._owed.discard(waiting)

    def pass_over(self, shape: Shape) -> None:
        """Go on to the next representative, although the replay of this one came to nothing."""
        self._due.pop(shape, None)

    def retire(self, shape: Shape) -> None:
        """Never replay a shape again; what it alone would cover is skipped from now on."""
        self._retired.add(shape)
        self._due.pop(shape, None)
        self._owed.discard(shape)
        waiting = self._waiting.pop(shape, None)
        self._skipped_work += waiting.work if waiting else 0

    def _oldest_below(self, shapes: Sequence[Shape]) -> dict[Shape, int]:
        """Return the representatives of waiting vectors of one fingerprint, and since when."""
        if len(shapes) == 1:
            return {shapes[0]: self._waiting[shapes[0]].first_step}
        found = build_catalog(self._waiting[shape].observation for shape in shapes)
        return {
            shape: min(self._waiting[below].first_step for below in found.covered_by(shape))
            for shape in found.representatives
        }

    def _is_covered(self, shape: Shape) -> bool:
        if self._catalog is None:
            return False
        if self._catalog.covers(shape):
            return self._catalog.representative_of(shape) not in self._retired
        covering = self._catalog.covering(self._observe(shape))
        return covering is not None and covering not in self._retired

    def _wait(self, shape: Shape, rows: int, step: int) -> None:
        known = self._waiting.get(shape)
        if shape in self._retired:
            self._skipped_work += rows
        elif known is not None:
            self._waiting[shape] = replace(known, work=known.work + rows, last_step=step)
        elif len(self._waiting) < self._max_waiting:
            self._waiting[shape] = _Waiting(self._observe(shape), rows, step, step)
        else:
            self._skipped_work += rows

    def _sample(self, shapes: list[Shape], step: int) -> set[Shape]:
        if self._lookups is None or len(shapes) <= self._lookups:
            return set(shapes)
        start = step * self._lookups
        return {shapes[(start + i) % len(shapes)] for i in range(self._lookups)}


def agree_queue(queues: Sequence[Sequence[Shape]], observe: Observe) -> tuple[Shape, ...]:
    """Join the queues of all peers into the one that each of them replays.

    Peers route different tokens, so their queues differ, but a replay needs all of them.

    Args:
        queues: one per peer; the result is the same on each peer, whatever their order.
    """
    union = {shape for queue in queues for shape in queue}
    return build_catalog(map(observe, union)).representatives if union else ()


def _rows(shape: Shape) -> int:
    return shape if isinstance(shape, int) else sum(shape)
