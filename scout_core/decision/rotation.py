"""Which recipe a check replays: a fixed rotation, the same on every rank without a message.

A recipe is one path class ("hidden:Block", "embedding", ..., "optimizer"). A cycle is one check of
every recipe. Inside a recipe the sites take turns, one cycle after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.errors import ScoutError

OPTIMIZER = "optimizer"


class Turn(NamedTuple):
    """What one check does."""

    check: int  # counts checks from 0
    recipe: str
    round: int  # how often this recipe has had its turn before; picks the site and the source


@dataclass(frozen=True)
class Rotation:
    """The catalogue of recipes in the order of their turns. `len(recipes)` is the gate's K."""

    recipes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.recipes)) != len(self.recipes):
            raise ScoutError(f"recipes {self.recipes} repeat a name; each path class has one turn")

    def turn(self, check: int) -> Turn | None:
        """Return what check number `check` (from 0) does; None when there is nothing to replay."""
        if not self.recipes:
            return None
        rounds, position = divmod(check, len(self.recipes))
        return Turn(check, self.recipes[position], rounds)

    def without(self, recipe: str) -> Rotation:
        """Return the rotation after a recipe was retired."""
        return Rotation(tuple(name for name in self.recipes if name != recipe))


def merge(catalogues: Sequence[Sequence[str]]) -> Rotation:
    """Join the path classes of all ranks, in order of first appearance over ascending ranks.

    With pipeline stages no single rank has them all; a rank without a recipe sits that check out.
    """
    return Rotation(tuple(dict.fromkeys(name for names in catalogues for name in names)))


def is_due(step: int, interval_steps: int) -> bool:
    """Tell whether the end of optimizer step `step` (from 1) has a check."""
    return step >= 1 and step % interval_steps == 0


def expected_latency_steps(interval_steps: int, recipes: int, sites: int) -> float:
    """Mean steps from a fault in one site of one recipe to its check.

    Args:
        sites: modules that share the recipe's turns; 1 for a fault of the rank itself, which every
            replay of the path class shows.

    A fault starts at a random step of the rotation of interval * recipes * sites steps.
    """
    return (interval_steps * recipes * sites + 1) / 2
