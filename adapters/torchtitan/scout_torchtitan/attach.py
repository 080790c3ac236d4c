"""Attach SCOUT to a Trainer that has just been built, and let go of it when the Trainer closes."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager

from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo
from scout_core.integration import enable
from scout_core.integration.models import Patterns
from scout_core.integration.session import Session
from scout_core.integration.wrapping import wrap_method
from scout_torchtitan.checkpoints import Found, GatedManager
from scout_torchtitan.framework import TorchTitan
from scout_torchtitan.metrics import add_metrics
from scout_torchtitan.phases import publish_phases
from scout_torchtitan.settings import config_of


def attach(trainer: Any, checkpointer: CheckpointManager) -> Session:
    """Start a session for this trainer; all ranks call it together, before training starts.

    Args:
        trainer: a `torchtitan.train.Trainer`, or a subclass, whose job config has `[scout]`; it
            gets the session as `trainer.scout`.
        checkpointer: its checkpoint manager, which the trainer does not hold yet.

    Raises:
        ScoutError: a bad value, or a job that SCOUT cannot follow. Nothing has been attached then.
    """
    job = trainer.job_config
    config = config_of(job.scout)
    refuse_unknown_ranks(job)
    if not config.job:
        config = config.model_copy(update={"job": job.job.description})
    framework = TorchTitan(trainer, Patterns(config.layers, config.embedding, config.head))
    # Looked at before the collectives below: after them a faster rank may write already.
    found = Found.by(checkpointer) if checkpointer.enable else None
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = job.scout.run_dir or pathlib.Path(job.job.dump_folder) / "scout" / started
    session = enable.attach(framework, config, run_dir=folder, dataloader=trainer.dataloader)
    trainer.scout = session
    undos: list[Undo] = []
    if found is not None:
        undos += GatedManager(trainer, checkpointer, session, found).install()
    undos += publish_phases(trainer, checkpointer, session)
    undos.append(add_metrics(trainer.metrics_processor, session))
    _close_with(trainer, session, undos)
    return session


def refuse_unknown_ranks(job: Any) -> None:
    """Refuse modes in which a global rank is not one fixed process of this job.

    Raises:
        ScoutError: torchft, whose replica groups come and go, or a simulated communication mode.
    """
    if job.fault_tolerance.enable:
        raise ScoutError(
            "fault_tolerance.enable = true: torchft changes which ranks take part while the job "
            "runs, and SCOUT's peer groups are fixed; set scout.enable = false or "
            "fault_tolerance.enable = false"
        )
    if job.comm.mode != "default":
        raise ScoutError(
            f"comm.mode = {job.comm.mode!r} does not communicate between processes, so no rank can "
            "be compared with another; set scout.enable = false or comm.mode = 'default'"
        )


def _close_with(trainer: Any, session: Session, undos: Sequence[Undo]) -> None:
    """Close the session first when the trainer is closed: its groups need the process group."""

    def around(original: Callable[[], None]) -> None:
        session.close()
        for undo in reversed(undos):
            undo()
        original()

    wrap_method(trainer, "close", around)
