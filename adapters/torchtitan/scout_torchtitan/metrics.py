"""SCOUT's counters in torchtitan's metrics (TensorBoard, W&B), each with the prefix `scout/`."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from scout_core.decision.incident import Kind
from scout_core.integration.session import Session

PREFIX = "scout/"


def counters(session: Session) -> dict[str, float]:
    """Return how often SCOUT checked and what it reported so far, by kind of incident."""
    kinds = Counter(incident.kind for incident in session.incidents())
    found = {f"{PREFIX}incidents/{kind.value}": float(kinds[kind]) for kind in Kind if kinds[kind]}
    return {
        f"{PREFIX}checks": float(session.check_count),
        f"{PREFIX}armed": float(session.armed),
        f"{PREFIX}incidents": float(kinds.total()),
        **found,
    }


def add_metrics(processor: Any, session: Session) -> None:
    """Let each `log` call of this metrics processor carry SCOUT's counters too.

    Args:
        processor: a `torchtitan.components.metrics.MetricsProcessor`; only this object changes.
    """
    original = processor.log

    @functools.wraps(original)
    def log(
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        both = {**(extra_metrics or {}), **counters(session)}
        original(step, global_avg_loss, global_max_loss, grad_norm, both)

    processor.log = log
