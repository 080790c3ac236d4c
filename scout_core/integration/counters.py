"""What a run's dashboards show of SCOUT: a few counters, whatever framework writes them."""

from __future__ import annotations

from collections import Counter

from scout_core.decision.incident import Kind
from scout_core.integration.session import Session


def counters(session: Session) -> dict[str, float]:
    """Return checks, armed or not (1 or 0), and incidents so far, in all and by kind."""
    kinds = Counter(incident.kind for incident in session.incidents())
    found = {f"incidents/{kind.value}": float(kinds[kind]) for kind in Kind if kinds[kind]}
    return {
        "checks": float(session.check_count),
        "armed": float(session.armed),
        "incidents": float(kinds.total()),
        **found,
    }
