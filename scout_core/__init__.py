"""SCOUT: which rank, machine or group is at fault, and which checkpoint can be trusted.

Importing this package loads no torch; names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scout_core.config import ScoutConfig
    from scout_core.decision.consensus import Status, Verdict
    from scout_core.decision.incident import Incident
    from scout_core.decision.topology import Coordinate, Topology
    from scout_core.errors import ScoutError
    from scout_core.integration.enable import enable_resiliency
    from scout_core.integration.session import Session

__all__ = [
    "Coordinate",
    "Incident",
    "ScoutConfig",
    "ScoutError",
    "Session",
    "Status",
    "Topology",
    "Verdict",
    "enable_resiliency",
]

_HOMES = {
    "Coordinate": "scout_core.decision.topology",
    "Incident": "scout_core.decision.incident",
    "ScoutConfig": "scout_core.config",
    "ScoutError": "scout_core.errors",
    "Session": "scout_core.integration.session",
    "Status": "scout_core.decision.consensus",
    "Topology": "scout_core.decision.topology",
    "Verdict": "scout_core.decision.consensus",
    "enable_resiliency": "scout_core.integration.enable",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'scout_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
