"""What it means that a parameter is not its own fp32 master cast down: hardware, or an edit.

The comparison needs no peer, but naming a rank does: software that edits a parameter between two
steps looks alike on one rank. It edits it on every rank that holds a part, and all of it, while a
fault damages one rank, or few elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from scout_core.decision.topology import MIN_PEERS

LARGEST_FAULT = 0.01
"""Share of a parameter's elements that a fault may damage to be told from an edit without peers."""


class Incoherent(NamedTuple):
    """One parameter of one rank that differed from its master cast down."""

    name: str
    step: int  # optimizer steps that had ended when it was first seen
    changed: int  # elements that differ, at least 1
    elements: int  # of the parameter that this rank holds with their master
    owners: int  # ranks among which the parameter is spread

    def in_words(self) -> str:
        """Say what was seen and when."""
        return f"{self.changed} elements from {self.name} on differed after {self.step} steps"


class Judged(NamedTuple):
    """One finding: the names, and the ranks at fault or, unnamed, the ranks that show it."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]  # ascending
    is_fault: bool
    evidence: str  # what was seen first, in words


def judge(found: Mapping[int, tuple[Incoherent, ...]]) -> list[Judged]:
    """Tell faults of single ranks from edits by software.

    Args:
        found: by global rank, the parameters that are not coherent; of one work group.

    Returns:
        One entry per rank at fault, ascending, then at most one for all edits.
    """
    spread = sum(any(item.owners >= MIN_PEERS for item in items) for items in found.values())
    faults: list[Judged] = []
    edits: list[tuple[int, Incoherent]] = []
    for rank, items in sorted(found.items()):
        local = [item for item in items if _is_local(item, spread)]
        if local:
            names = tuple(item.name for item in local)
            faults.append(Judged(names, (rank,), True, local[0].in_words()))
        edits += [(rank, item) for item in items if item not in local]
    if not edits:
        return faults
    names = tuple(sorted({item.name for _, item in edits}))
    ranks = tuple(sorted({rank for rank, _ in edits}))
    return [*faults, Judged(names, ranks, False, edits[0][1].in_words())]


def _is_local(item: Incoherent, spread: int) -> bool:
    """Tell whether only this rank can have caused it.

    Args:
        spread: ranks that show a parameter which at least 3 ranks hold parts of.
    """
    if item.owners >= MIN_PEERS:
        return 2 * spread < item.owners
    return item.changed <= LARGEST_FAULT * item.elements
