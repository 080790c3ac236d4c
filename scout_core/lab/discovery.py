"""Find a catalogue offline, on the machine it is for: observe every shape, more than once."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from scout_core.decision.catalog import (
    MIN_REPEATS,
    Observation,
    Shape,
    build_catalog,
    exact_observation,
)
from scout_core.decision.catalog_file import CatalogFile, Discovery
from scout_core.decision.environment import Environment
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import Entry, Journal
from scout_core.evidence.kernel_profile import Profiler, Unseen


class Plan(NamedTuple):
    """What to observe."""

    shapes: tuple[Shape, ...]
    """The admissible shapes."""
    environment: Environment
    repeats: int = MIN_REPEATS

    @property
    def key(self) -> str:
        """Name the plan, so that a journal continues only an equal one."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def discover(
    plan: Plan,
    profiler: Profiler,
    journal: Journal | None = None,
    advance: Callable[[int], None] = lambda observations: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CatalogFile:
    """Observe every shape and find the representatives.

    All shapes are observed once before any is observed again, so that what differs over time, such
    as autotuning, shows.

    Args:
        journal: continued from, and added to; the caller deletes it once the result is safe.
        advance: called with the number of observations that were added.

    Raises:
        ScoutError: fewer than `MIN_REPEATS` repeats, no shapes, or observations of a shape that
            differ.
    """
    if plan.repeats < MIN_REPEATS:
        raise ScoutError(
            f"repeats={plan.repeats} of a discovery must be >= {MIN_REPEATS}: whether a kernel "
            "choice depends on the shape alone shows only when it is repeated"
        )
    if not plan.shapes:
        raise ScoutError("a discovery needs at least one shape; none was given")
    entries = list(journal.entries) if journal else []
    resumed = len(entries)
    advance(resumed)
    for entry in _observe(plan, profiler, Counter(each.shape for each in entries), clock):
        entries.append(entry)
        if journal:
            journal.add(entry)
        advance(1)
    return _conclude(plan, profiler.name, entries, resumed, clock)


def _observe(
    plan: Plan, profiler: Profiler, done: Counter[Shape], clock: Callable[[], float]
) -> Iterator[Entry]:
    for repeat in range(plan.repeats):
        for shape in plan.shapes:
            if done[shape] > repeat:
                continue
            start = clock()
            seen = profiler.observe(shape)
            seconds = clock() - start
            if isinstance(seen, Unseen):
                yield Entry(shape, seconds, None, seen.reason)
            else:
                yield Entry(shape, seconds, seen, "")


def _conclude(
    plan: Plan,
    source: str,
    entries: Sequence[Entry],
    resumed: int,
    clock: Callable[[], float],
) -> CatalogFile:
    start = clock()
    catalog = build_catalog(_agreeing(entries), requested=plan.shapes, repeats=plan.repeats)
    build_s = clock() - start
    reasons = {each.shape: each.unseen for each in entries if each.observation is None}
    discovery = Discovery(
        source=source,
        shapes=len(plan.shapes),
        repeats=plan.repeats,
        resumed=resumed,
        observe_s=sum(each.seconds for each in entries),
        build_s=build_s,
        unseen=dict(Counter(reasons.values())),
    )
    return CatalogFile(plan.environment, discovery, catalog)


def _agreeing(entries: Sequence[Entry]) -> Iterator[Observation]:
    """Yield the observations; a shape that was not seen even once stands for itself."""
    unseen = {each.shape for each in entries if each.observation is None}
    for each in entries:
        if each.shape in unseen:
            yield exact_observation(each.shape)
        elif each.observation is not None:
            yield each.observation
