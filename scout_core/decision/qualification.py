"""What may be compared exactly: only what has proved reproducible.

A recipe or a piece of state that is not bitwise reproducible in healthy training is listed as not
covered; it never accuses anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scout_core.decision.replay_verdict import Report


@dataclass(frozen=True)
class Qualification:
    """Recipes and state units that are armed, and those that are not and why."""

    recipes: frozenset[str] = frozenset()
    """Replayed at least once with equal repeats on every rank."""
    units: frozenset[str] = frozenset()
    """State units that were equal on all replicas when first seen."""
    differing_units: frozenset[str] = frozenset()
    """State units that differed when first seen: not judged from then on."""

    def with_recipe(self, recipe: str) -> Qualification:
        """Arm a recipe."""
        return Qualification(self.recipes | {recipe}, self.units, self.differing_units)

    def with_units(
        self, reports: Mapping[int, Report], replicas: Sequence[tuple[int, ...]]
    ) -> Qualification:
        """Arm the state units that are seen for the first time and equal on all replicas.

        Args:
            reports: by global rank of one work group.
            replicas: groups of ranks that hold the same state.
        """
        seen = {name for report in reports.values() for name in report.state}
        new = seen - self.units - self.differing_units
        equal = {name for name in new if _is_equal(name, reports, replicas)}
        return Qualification(self.recipes, self.units | equal, self.differing_units | (new - equal))


def unrepeatable(reports: Mapping[int, Report]) -> tuple[int, ...]:
    """Global ranks whose own repeats of one call differed, ascending."""
    return tuple(sorted(rank for rank, report in reports.items() if not report.repeatable))


def why_not_reproducible(armed: bool, reports: Mapping[int, Report]) -> str:
    """Say why a recipe cannot be compared exactly; empty when it can.

    Before a recipe is armed, one rank that disagrees with itself is enough: it may be the code.
    Afterwards only a majority is: a minority is evidence of a fault and stays with C3.
    """
    ranks = unrepeatable(reports)
    if not ranks or (armed and 2 * len(ranks) < len(reports)):
        return ""
    return f"not bitwise reproducible on ranks {list(ranks)}: two replays of one call differ"


def _is_equal(
    unit: str, reports: Mapping[int, Report], replicas: Sequence[tuple[int, ...]]
) -> bool:
    return all(len({reports[rank].state.get(unit) for rank in group}) == 1 for group in replicas)
