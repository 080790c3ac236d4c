"""SCOUT's counters in DeepSpeed's monitor (TensorBoard, W&B, CSV, Comet)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scout_core.decision.incident import Kind
from scout_core.integration.session import Session
from scout_deepspeed.framework import DeepSpeed


def report_to(monitor: Any, engine: Any, framework: DeepSpeed, session: Session) -> None:
    """Write the counters after each step that had a check.

    Args:
        monitor: a `deepspeed.monitor.monitor.MonitorMaster`; it writes on rank 0 only.
    """
    if not monitor.enabled:
        return
    seen = 0

    def write() -> None:
        nonlocal seen
        if session.check_count != seen:
            seen = session.check_count
            monitor.write_events([(n, v, engine.global_samples) for n, v in counters(session)])

    framework.on_step_end(write)


def counters(session: Session) -> list[tuple[str, float]]:
    """Name and value of each counter: checks, armed or not, incidents in all and by kind."""
    kinds = Counter(incident.kind for incident in session.incidents())
    return [
        ("Scout/checks", float(session.check_count)),
        ("Scout/armed", float(session.armed)),
        ("Scout/incidents", float(kinds.total())),
        *((f"Scout/incidents/{kind.value}", float(kinds[kind])) for kind in Kind if kinds[kind]),
    ]
