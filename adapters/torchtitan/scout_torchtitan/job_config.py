"""What `[job] custom_config_module = "scout_torchtitan.job_config"` loads.

torchtitan merges the class `JobConfig` of this module into its own: the fields of the table
`[scout]`, from TOML and the command line. Importing it also leaves one hand-over where the Trainer
shows itself to a component for the first time; whether SCOUT is on is decided there, because only
then the command line, which wins, has been read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager

from scout_torchtitan.settings import Scout

JobConfig: type[Any] = dataclasses.make_dataclass(
    "JobConfig", [("scout", Scout, dataclasses.field(default_factory=Scout))]
)


def install_hand_over() -> Callable[[], None]:
    """Attach SCOUT when the next Trainer has built its checkpoint manager, if its job wants that.

    The manager is the one component that is given the whole Trainer, when model, optimizers and
    metrics are there; it is built even when checkpoints are off. Checked with torchtitan 0.2.2.

    Returns:
        What takes the hand-over back; it also takes itself back after its one use.
    """
    original = CheckpointManager.__init__

    @functools.wraps(original)
    def init(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        trainer = self.states.get("train_state")
        settings = getattr(getattr(trainer, "job_config", None), "scout", None)
        if settings is None:
            return  # not a Trainer of a job that has the table [scout]
        take_back()
        if settings.enable:
            from scout_torchtitan.attach import attach

            attach(trainer, self)

    def take_back() -> None:
        CheckpointManager.__init__ = original

    CheckpointManager.__init__ = init
    return take_back


install_hand_over()
