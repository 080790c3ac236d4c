"""One job of megatron.training that SCOUT is attached to."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.training import get_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from torch import nn

from scout_core.integration import enable
from scout_core.integration.counters import counters
from scout_core.report.events import print_line
from scout_megatron.attachment import framework_of
from scout_megatron.checkpoints import CheckpointGate
from scout_megatron.options import config_of

PREFIX = "scout/"


class TrainingJob:
    """The session of a job, from the moment the optimizer exists to the end of the process."""

    def __init__(
        self, args: argparse.Namespace, model: Sequence[nn.Module], optimizer: Any
    ) -> None:
        """Attach; all ranks call it together.

        Args:
            args: Megatron's, with the options of `add_scout_args`.

        Raises:
            ScoutError: see `attach`.
        """
        config = config_of(args)
        self._framework = framework_of(model, optimizer, config)
        self.session = enable.attach(self._framework, config, run_dir=args.scout_run_dir)
        self.gate = CheckpointGate(args, self.session) if args.save else None
        """None when the job saves nothing."""
        self._checks = self._skipped = 0
        self._framework.on_step_end(self._after_step)

    def watch_loader(self, loader: Iterable[Any]) -> None:
        """Publish when training waits for a batch of this loader."""
        if self.session.hang is not None:
            self.session.hang.watch_loader(loader)

    def _after_step(self) -> None:
        if self._framework.skipped_steps != self._skipped:
            self._say_skipped()
        if self.session.check_count != self._checks:
            self._checks = self.session.check_count
            self._write_counters()

    def _say_skipped(self) -> None:
        if self._skipped == 0 and dist.get_rank() == 0:
            print_line(
                f"scout: the update of iteration {iteration()} was skipped, as some later ones may "
                "be; skipped iterations are checked and count as steps"
            )
        self._skipped = self._framework.skipped_steps

    def _write_counters(self) -> None:
        """Write to TensorBoard and W&B, on the rank that Megatron lets write."""
        values = {**counters(self.session), "skipped_steps": float(self._skipped)}
        named = {f"{PREFIX}{name}": value for name, value in values.items()}
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if tensorboard is not None:
            for name, value in named.items():
                tensorboard.add_scalar(name, value, iteration())
        if wandb is not None:
            wandb.log(named, iteration())


def iteration() -> int:
    """The iteration that is ending now, from 1."""
    return int(get_args().curr_iteration) + 1
