"""The cost model of replay: V/(I*N), and how soon a fault is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.decision.rotation import expected_latency_steps
from scout_core.errors import ScoutError


@dataclass(frozen=True)
class Plan:
    """What the cost depends on."""

    layers: int
    """N: repeated hidden layers; one of them takes 1/N of a training step."""
    interval_steps: int
    """I: optimizer steps between two checks."""
    variants: int
    """V: replays of one layer in one check, repeats for timing included."""
    step_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layers", "interval_steps", "variants", "step_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ScoutError(f"{name}={value} of the plan must be a finite number > 0")


class Cost(NamedTuple):
    """What a plan comes to."""

    overhead: float  # share of training time
    check_steps: float  # one check, in training steps
    check_s: float
    rank_latency_s: float  # mean time until a fault that any layer shows is seen
    layer_latency_s: float  # the same when only one layer shows it


def cost_of(plan: Plan) -> Cost:
    """Apply V/(I*N): the example of the paper, 3/(20*50), is 0.3 %."""
    check_steps = plan.variants / plan.layers
    any_layer = expected_latency_steps(plan.interval_steps, 1, 1)
    one_layer = expected_latency_steps(plan.interval_steps, 1, plan.layers)
    return Cost(
        check_steps / plan.interval_steps,
        check_steps,
        check_steps * plan.step_s,
        any_layer * plan.step_s,
        one_layer * plan.step_s,
    )
