"""Tell the hang observer what an engine does besides training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scout_core.evidence.capture import Undo
from scout_core.integration.session import Session
from scout_core.integration.wrapping import wrap_method

PHASE_OF = {
    "eval_batch": "evaluation",  # of a PipelineEngine
    "_next_batch": "data",  # of a PipelineEngine; private, checked with deepspeed 0.19.8
}
"""Methods of an engine that are no part of a step, or wait for the data loader; saves and loads
publish their phase in `checkpoints`."""


def publish_phases(engine: Any, session: Session) -> list[Undo]:
    """Let each of these methods count against its own time limit; returns what ends that."""
    return [
        wrap_method(engine, method, _during(session, phase))
        for method, phase in PHASE_OF.items()
        if hasattr(engine, method)
    ]


def _during(session: Session, phase: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with session.phase(phase):
            return original(*args, **kwargs)

    return around
