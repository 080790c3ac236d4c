"""Tell the hang observer when the trainer validates or handles checkpoints: other time limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager

from scout_core.evidence.capture import Undo
from scout_core.integration.session import Session
from scout_core.integration.wrapping import wrap_method


def publish_phases(trainer: Any, checkpointer: CheckpointManager, session: Session) -> list[Undo]:
    """Publish the phases "checkpoint" and "evaluation" of this trainer.

    The validator does not exist yet: it is wrapped when training starts.
    """
    undos = [
        wrap_method(checkpointer, name, _during("checkpoint", session))
        for name in ("save", "load", "maybe_wait_for_staging")
    ]

    def before_training(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if trainer.job_config.validation.enable:
            validate = _during("evaluation", session)
            undos.append(wrap_method(trainer.validator, "validate", validate))
        return original(*args, **kwargs)

    undos.append(wrap_method(trainer, "train", before_training))
    return undos


def _during(phase: str, session: Session) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with session.phase(phase):
            return original(*args, **kwargs)

    return around
