"""SCOUT's counters in torchtitan's metrics (TensorBoard, W&B), each with the prefix `scout/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scout_core.evidence.capture import Undo
from scout_core.integration.counters import counters
from scout_core.integration.session import Session
from scout_core.integration.wrapping import wrap_method

PREFIX = "scout/"


def add_metrics(processor: Any, session: Session) -> Undo:
    """Let each `log` call of this metrics processor carry SCOUT's counters too.

    Args:
        processor: a `torchtitan.components.metrics.MetricsProcessor`; only this object changes.
    """

    def around(
        original: Callable[..., None], *args: Any, extra_metrics: Any = None, **kwargs: Any
    ) -> None:
        found = {f"{PREFIX}{name}": value for name, value in counters(session).items()}
        original(*args, extra_metrics={**(extra_metrics or {}), **found}, **kwargs)

    return wrap_method(processor, "log", around)
