"""How long a trainer may be silent, by the phase it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scout_core.decision.snapshots import Phase


@dataclass(frozen=True)
class Limits:
    """Seconds without visible progress before a rank counts as late."""

    step_s: float
    """Forward, backward, optimizer and whatever is not named."""
    initialize_s: float
    data_s: float
    evaluation_s: float
    checkpoint_s: float

    def of(self, phase: Phase) -> float:
        """Return the limit of a phase; a paused job has none."""
        return {
            Phase.INITIALIZE: self.initialize_s,
            Phase.DATA: self.data_s,
            Phase.EVALUATION: self.evaluation_s,
            Phase.CHECKPOINT: self.checkpoint_s,
            Phase.IDLE: math.inf,
        }.get(phase, self.step_s)

    @property
    def shortest_s(self) -> float:
        """The smallest limit: it sets the pace of the agent."""
        return min(
            self.step_s, self.initialize_s, self.data_s, self.evaluation_s, self.checkpoint_s
        )

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Limits:
        """Read the fields from JSON values."""
        return cls(**{name: float(value) for name, value in plain.items()})


def phase_named(text: str) -> Phase:
    """Return the phase of a ring's text; an unknown one has the limit of a step."""
    try:
        return Phase(text)
    except ValueError:
        return Phase.UNKNOWN
