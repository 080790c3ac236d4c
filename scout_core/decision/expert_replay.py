"""What the turns of one class of expert stages replay, and what that proves.

All ranks of a job keep one `ExpertReplays` per class and feed it the same agreed values, so they
plan the same replays without a coordinator; only the accounting of executed rows is a rank's own.

# Note [Cycle of an expert class]
The checkpoint gate counts each representative as a recipe, and one more: the rows that training
executed and no representative covers. Representatives take turns in a ring, whatever their replays
come to, so none waits longer than one round. The executed rows have cycles of their own: one ends
when everything that waited as it began has been replayed and agreed upon. It then speaks for the
steps up to that beginning, not for later ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.decision.catalog import Catalog, Shape, name_of, order
from scout_core.decision.path_coverage import Observe, PathCoverage, Shares, agree_queue

Rows = tuple[int, ...]
"""Rows of each local expert, in their order."""
EXECUTED = "executed rows"
MOST_COMPARED = 64  # shapes that ranks ask for, of which one check picks its own


@dataclass(frozen=True)
class Launches:
    """How the rows of a call become shapes of a catalogue, and back."""

    num_experts: int
    """Local experts of a stage."""
    grouped: bool
    """One kernel computes all of them, so their row counts act together; else one kernel each."""
    plain: bool = False
    """The catalogue writes shapes of one expert as numbers, not as vectors of length 1."""

    def shapes(self, rows: Rows) -> tuple[Shape, ...]:
        """Return the shapes that one call executes; an expert without rows alone launches none."""
        if self.grouped:
            return (rows[0] if self.plain else rows,)
        return tuple(n if self.plain else (n,) for n in rows if n)

    def rows(self, shape: Shape) -> Rows:
        """Return the rows that replay a shape: an expert's shape on each of the local experts."""
        if isinstance(shape, int):
            return (shape,) * self.num_experts
        return shape if self.grouped else shape * self.num_experts


class Planned(NamedTuple):
    """One replay of an expert stage."""

    recipe: str
    rows: Rows | None  # None: those of the sampled call
    shape: Shape | None
    completes: bool  # it is all that its recipe needs; False for one of the executed rows


class Cycle(NamedTuple):
    """How far this rank is in the cycle of executed rows; the job is as far as its last rank."""

    done: bool
    """Everything that waited as it began has been replayed."""
    empty: bool
    """Nothing waits now."""
    lost: bool
    """Executed rows were skipped: the cycle proves nothing about executed rows."""


class ExpertReplays:
    """The rotation and the accounting of one class of expert stages."""

    def __init__(
        self,
        name: str,
        launches: Launches,
        catalog: Catalog | None,
        observe: Observe,
        *,
        slots: int,
        lookups_per_step: int | None = None,
    ) -> None:
        """Begin without executed rows.

        Args:
            name: the path class.
            catalog: None: every executed shape is replayed itself.
            observe: see `PathCoverage`.
            slots: replays at one check.
        """
        self._name = name
        self._launches = launches
        self._catalog = catalog
        self._observe = observe
        self._slots = slots
        self._coverage = PathCoverage(catalog, observe, lookups_per_step=lookups_per_step)
        self._failed: dict[Shape, int] = {}
        self._retired: set[Shape] = set()
        self._began = 0  # last step before this cycle
        self._skipped = 0  # rows that were skipped before this cycle

    @property
    def executed_recipe(self) -> str:
        """Recipe of what training executed and no representative covers."""
        return f"{self._name} {EXECUTED}"

    @property
    def recipes(self) -> tuple[str, ...]:
        """Recipes of one cycle, for the checkpoint gate; see Note [Cycle of an expert class]."""
        return (*map(self._recipe_of, self._representatives), self.executed_recipe)

    @property
    def cycle_checks(self) -> int:
        """Checks until each representative was replayed, while nothing waits."""
        return max(-(-len(self._representatives) // self._slots), 1)

    @property
    def shares(self) -> Shares:
        """What covers the rows that this rank executed."""
        return self._coverage.shares

    def on_calls(self, calls: Iterable[tuple[int, Rows]], missed_rows: int = 0) -> None:
        """Account for executed calls.

        Args:
            calls: (optimizer step from 1, rows) in the order of the steps.
            missed_rows: of calls whose vectors were not kept.
        """
        by_step: dict[int, list[Shape]] = {}
        for step, rows in calls:
            by_step.setdefault(step, []).extend(self._launches.shapes(rows))
        for step, shapes in by_step.items():
            self._coverage.on_step(step, shapes)
        self._coverage.skip(missed_rows)

    def waiting(self, most: int) -> tuple[Shape, ...]:
        """Return what this rank wants to have replayed, oldest first."""
        return self._coverage.queue[:most]

    def plan(self, queues: Sequence[Sequence[Shape]]) -> tuple[Planned, ...]:
        """Return the replays of one check, the same on every rank; call it once per check.

        Args:
            queues: what `waiting` returned, of all ranks in rank order.

        With nothing due and nothing waiting, the sampled call is replayed as it was.
        """
        place: dict[Shape, int] = {}
        for queue in queues:
            for position, shape in enumerate(queue):
                place[shape] = min(place.get(shape, position), position)

        def turn(shape: Shape) -> tuple[int, int, tuple[int, ...]]:
            return self._failed.get(shape, 0), place[shape], order(shape)

        self._coverage.refill()
        first = sorted(place.keys() - self._retired, key=turn)[:MOST_COMPARED]
        agreed = sorted(agree_queue([first], self._observe), key=turn)
        planned = dict.fromkeys(self._coverage.plan(self._slots, agreed))
        if not planned:
            return (Planned(self.executed_recipe, None, None, False),)
        return tuple(self._planned(shape) for shape in planned)

    def on_result(self, planned: Planned, step: int, clean: bool) -> None:
        """Take in what a replay came to, job-wide.

        Args:
            step: last optimizer step that was executed before it.
        """
        if planned.shape is None:
            return
        if clean:
            self._failed.pop(planned.shape, None)
            self._coverage.on_clean_replay(planned.shape, step)
        else:
            self._failed[planned.shape] = self._failed.get(planned.shape, 0) + 1
            self._coverage.pass_over(planned.shape)

    def retire(self, planned: Planned) -> None:
        """Never replay a shape again, because its replay cannot be compared."""
        if planned.shape is not None:
            self._retired.add(planned.shape)
            self._coverage.retire(planned.shape)

    @property
    def cycle(self) -> Cycle:
        """How far this rank is."""
        lost = self.shares.skipped > self._skipped
        return Cycle(not self._coverage.owes, not self.shares.queued, lost)

    def next_cycle(self, step: int, empty: bool) -> int:
        """Begin a cycle on all ranks together; return the last step that the finished one proves.

        Args:
            step: last optimizer step that was executed.
            empty: nothing waits on any rank.
        """
        proven = step if empty else self._began
        self._coverage.owe()
        self._began, self._skipped = step, self.shares.skipped
        return proven

    def begin_sweep(self, step: int) -> None:
        """Owe every representative and everything that waits now."""
        self._coverage.start_cycle()
        self._began, self._skipped = step, self.shares.skipped

    @property
    def swept(self) -> bool:
        """Everything that a sweep owed has been replayed."""
        return self._coverage.cycle_done

    @property
    def _representatives(self) -> tuple[Shape, ...]:
        found = self._catalog.representatives if self._catalog is not None else ()
        return tuple(shape for shape in found if shape not in self._retired)

    def _planned(self, shape: Shape) -> Planned:
        completes = shape in self._representatives
        recipe = self._recipe_of(shape) if completes else self.executed_recipe
        return Planned(recipe, self._launches.rows(shape), shape, completes)

    def _recipe_of(self, shape: Shape) -> str:
        return f"{self._name} {name_of(shape)} rows"
