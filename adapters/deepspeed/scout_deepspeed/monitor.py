"""SCOUT's counters in DeepSpeed's monitor (TensorBoard, W&B, CSV, Comet), each below `Scout/`."""

from __future__ import annotations

from typing import Any

from scout_core.evidence.capture import Undo
from scout_core.integration.counters import counters
from scout_core.integration.session import Session
from scout_deepspeed.framework import DeepSpeed

PREFIX = "Scout/"


def report_to(monitor: Any, engine: Any, framework: DeepSpeed, session: Session) -> Undo:
    """Write the counters after each step that had a check; returns what ends that.

    Args:
        monitor: a `deepspeed.monitor.monitor.MonitorMaster`; it writes on rank 0 only.
    """
    if not monitor.enabled:
        return lambda: None
    seen = 0

    def write() -> None:
        nonlocal seen
        if session.check_count != seen:
            seen = session.check_count
            values = counters(session).items()
            monitor.write_events([(PREFIX + n, v, engine.global_samples) for n, v in values])

    return framework.on_step_end(write)
