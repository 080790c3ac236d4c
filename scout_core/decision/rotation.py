"""Which recipes a check replays: a fixed rotation, the same on every rank without a message.

A recipe is one path class ("hidden:Block", "expert:Experts", "embedding", ..., "optimizer"). Every
check replays one hidden layer, one expert stage and one other recipe. Hidden layers are timed at
every check; expert stages, which take less time and so tell less, at every second one. A cycle has
replayed every recipe. Inside a recipe the sites take turns, one after the other; what an expert
stage replays in its turn is in `decision.expert_replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.errors import ScoutError

OPTIMIZER = "optimizer"
AUDIT = "audit"  # what a check is called when no recipe can be replayed: state is audited still
AUDIT_EXPERTS = "audit experts"  # the same for experts, among whose peers nothing else is replayed
HIDDEN = "hidden"  # roles of repeated layers
EXPERT = "expert"


class Turn(NamedTuple):
    """One replay of a check."""

    recipe: str
    round: int  # how often this recipe has had its turn before; picks the site and the source
    timed: bool  # its time is compared
    of: str = ""  # path class, when the recipe is one of several of it

    @property
    def path_class(self) -> str:
        """Path class that is replayed."""
        return self.of or self.recipe


@dataclass(frozen=True)
class Rotation:
    """The catalogue of recipes in the order of their turns. `len(recipes)` is the gate's K."""

    recipes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.recipes)) != len(self.recipes):
            raise ScoutError(f"recipes {self.recipes} repeat a name; each path class has one turn")

    @property
    def hidden(self) -> tuple[str, ...]:
        """Recipes of hidden layers."""
        return tuple(name for name in self.recipes if name.startswith(HIDDEN))

    @property
    def experts(self) -> tuple[str, ...]:
        """Recipes of expert stages."""
        return tuple(name for name in self.recipes if name.startswith(EXPERT))

    @property
    def others(self) -> tuple[str, ...]:
        """All other recipes."""
        return tuple(name for name in self.recipes if not name.startswith((HIDDEN, EXPERT)))

    @property
    def cycle_checks(self) -> int:
        """Checks after which every recipe has been replayed at least once."""
        return max(len(self.hidden), len(self.experts), len(self.others), 1)

    def turns(self, check: int) -> tuple[Turn, ...]:
        """Return what check number `check` (from 0) replays: at most one recipe of each sort.

        When there are no repeated layers the other recipes are timed instead; when there is
        nothing to replay, one turn of the recipe AUDIT remains.
        """
        turns = []
        repeated = bool(self.hidden or self.experts)
        experts_timed = not self.hidden or check % 2 == 0
        sorts = ((self.hidden, True), (self.experts, experts_timed), (self.others, not repeated))
        for names, timed in sorts:
            if names:
                round_, position = divmod(check, len(names))
                turns.append(Turn(names[position], round_, timed))
        return tuple(turns) or (Turn(AUDIT, check, False),)

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


def expected_latency_steps(interval_steps: int, turns: int, sites: int) -> float:
    """Mean steps from a fault in one site of one recipe to its check.

    Args:
        turns: recipes that share the turns of this sort (`Rotation.hidden`, ...).
        sites: modules that share the recipe's turns; 1 for a fault of the rank itself, which every
            replay of the path class shows.

    A fault starts at a random step of the rotation of interval * turns * sites steps.
    """
    return (interval_steps * turns * sites + 1) / 2
