"""What the checks of one job can and cannot see."""

from __future__ import annotations

from dataclasses import dataclass

from scout_core.decision.path_coverage import Shares
from scout_core.decision.topology import GroupCoverage


@dataclass(frozen=True)
class ExpertCoverage:
    """What the replays of one class of expert stages cover."""

    recipe: str
    """Its path class."""
    relies_on: str
    """Catalogue, exact replay or sampled calls, and why."""
    shares: Shares | None = None
    """What covers the rows that this rank executed; None when they are not counted."""
    gap: str = ""
    """What is not covered whatever is replayed; empty when nothing is."""

    def line(self) -> str:
        """Say it in one line."""
        shares = f"; {self.shares} (this rank)" if self.shares is not None else ""
        return f"{self.recipe}: {self.relies_on}{shares}"


@dataclass(frozen=True)
class SessionCoverage:
    """What this job's checks can and cannot see."""

    groups: tuple[GroupCoverage, ...]
    state_groups: tuple[GroupCoverage, ...]
    recipes: tuple[str, ...]
    """Path classes that take turns."""
    not_covered: tuple[str, ...]
    """One sentence each."""
    cycle_steps: int
    """Optimizer steps after which every recipe has been replayed."""
    compares: str
    """Which time the straggler rule compares."""
    experts: tuple[ExpertCoverage, ...] = ()
    """One per class of expert stages."""

    def line(self) -> str:
        """Say it in one line."""
        able = {group.can for group in self.groups}
        word = "attribute" if able == {"attribute"} else "/".join(sorted(able))
        sizes = sorted({len(group.ranks) for group in self.groups})
        missing = f"; not covered: {'; '.join(self.not_covered)}" if self.not_covered else ""
        experts = "".join(f"; {each.line()}" for each in self.experts)
        return (
            f"{len(self.groups)} peer group(s) of {'/'.join(map(str, sizes))} can {word}; "
            f"{len(self.recipes)} recipes in a cycle of {self.cycle_steps} steps{missing}{experts}"
        )

    def gaps(self) -> tuple[str, ...]:
        """What keeps a checkpoint from being called verified, one sentence each."""
        groups = [g for g in (*self.groups, *self.state_groups) if g.can != "attribute"]
        by_reason: dict[str, list[str]] = {}
        for group in groups:
            by_reason.setdefault(group.why, []).append(str(list(group.ranks)))
        weak = [f"ranks {_few(members)}: {why}" for why, members in by_reason.items()]
        open_shapes = [f"{each.recipe}: {each.gap}" for each in self.experts if each.gap]
        return (*self.not_covered, *open_shapes, *weak)


def _few(items: list[str], most: int = 3) -> str:
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more groups" if rest > 0 else "")
