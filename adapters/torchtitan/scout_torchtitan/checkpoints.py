"""Put the checkpoint gate around torchtitan's CheckpointManager.

torchtitan goes on writing, finding and deleting its own checkpoints. The gate says which saves are
taken, which ones no purge may remove, and which one a restart loads. Private names of
`CheckpointManager` were checked with torchtitan 0.2.2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

import torch
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger

from scout_core.decision.labels import Failure, Label
from scout_core.evidence.capture import Undo
from scout_core.integration.gate_service import GateService
from scout_core.integration.restoring import no_trusted_checkpoint, restore
from scout_core.integration.saves import Purge
from scout_core.integration.session import Session
from scout_core.integration.trust_record import RECORD
from scout_core.integration.wrapping import wrap_method

WAY_OUT = (
    "answer for one of them with --checkpoint.load_step=N, for those that only lack replicas with "
    "--scout.accept_uncertified, or name another checkpoint.folder"
)


class Found(NamedTuple):
    """What a folder of checkpoints holds when a job starts."""

    checkpoint: bool
    """A complete one: torchtitan would load it."""
    only_record: bool
    """Nothing but SCOUT's record: without SCOUT the folder would not be there."""

    @classmethod
    def by(cls, manager: CheckpointManager) -> Self:
        """Look into the manager's folder; alike on all ranks before one of them may write."""
        names = os.listdir(manager.folder) if os.path.isdir(manager.folder) else []
        record = pathlib.Path(RECORD).stem  # its lock and a half-written one are named after it
        only_record = bool(names) and all(record in name for name in names)
        return cls(manager._find_load_step() != -1, only_record)


class GatedManager:
    """Feeds the gate from one trainer's checkpoint manager, and makes the manager obey it."""

    def __init__(
        self, trainer: Any, manager: CheckpointManager, session: Session, found: Found
    ) -> None:
        """Prepare; nothing is changed before `install`.

        Args:
            found: what the folder of checkpoints held before any rank came this far.
        """
        self._trainer = trainer
        self._manager = manager
        self._session = session
        self._found = found
        self._service: GateService | None = None
        keep = manager.keep_latest_k
        remove = functools.partial(shutil.rmtree, ignore_errors=True)
        self._purge = Purge(keep, remove) if keep > 0 else None

    def install(self) -> list[Undo]:
        """Wrap the methods of this trainer and this manager; returns what takes that back."""
        return [
            wrap_method(self._manager, "load", self._load),
            wrap_method(self._manager, "save", self._save),
            wrap_method(self._manager, "_purge_stale_checkpoints", self._purge_stale),
            wrap_method(self._trainer, "train", self._train),
        ]

    def _load(self, original: Callable[[int], bool], step: int = -1) -> bool:
        """Load what the gate chooses; a step that the user names is the user's choice.

        Raises:
            ScoutError: there are checkpoints, and the evidence allows none of them.
        """
        if not self._found.checkpoint:
            with self._folder_hidden() if self._found.only_record else contextlib.nullcontext():
                loaded = original(step)
            self._open().resumed(self._trainer.step or None)  # weights alone are step 0
        elif step != -1:
            loaded = original(step)
            self._open().resumed(step, self._path(step))
        else:
            loaded = self._load_chosen(original)
        self._session.resume_at(self._trainer.step)
        return loaded

    @contextlib.contextmanager
    def _folder_hidden(self) -> Iterator[None]:
        """Show torchtitan no folder, as if there were no SCOUT.

        Initial weights (`initial_load_path`, `initial_load_in_hf`) are loaded only then: a job that
        ended before its first checkpoint must not begin from random ones because of a record.
        """
        folder = self._manager.folder
        self._manager.folder = os.path.join(folder, "absent")
        try:
            yield
        finally:
            self._manager.folder = folder

    def _load_chosen(self, original: Callable[[int], bool]) -> bool:
        service = self._open()
        can_sweep = hasattr(self._trainer.model_args, "vocab_size")  # models of text
        chosen = restore(
            service,
            lambda choice: original(_known(choice.step)),
            sweep=self._sweep if can_sweep else None,
            accept_uncertified=self._trainer.job_config.scout.accept_uncertified,
        )
        if chosen.choice.step is not None:
            logger.info(f"SCOUT: starts from step {chosen.choice.step}: {chosen.choice.why}")
            return True
        if chosen.num_checkpoints:
            raise no_trusted_checkpoint(service, chosen, WAY_OUT)
        loaded = original(-1)  # of a run without SCOUT
        service.resumed(self._trainer.step if loaded else None)
        return loaded

    def _save(
        self, original: Callable[[int, bool], None], curr_step: int, last_step: bool = False
    ) -> None:
        manager, service = self._manager, self._service
        if service is None or not manager._should_save(curr_step, last_step):
            original(curr_step, last_step)
            return
        path = self._path(curr_step)
        label, _ = service.begin_save(curr_step, path)
        if label in (Label.CONDEMNED, Label.REFUSED):
            logger.warning(f"SCOUT: the checkpoint of step {curr_step} is {label.value}: not taken")
            return
        original(curr_step, last_step)
        if last_step and manager.last_save_model_only:
            return  # an export of weights: nothing can start from it
        runs_on = manager.async_mode != AsyncMode.DISABLED and not last_step
        save: Future[Any] | None = manager.save_future if runs_on else None
        service.add_pending(curr_step, path, lambda: "" if save is None else _outcome(save))
        service.settle(self._purge)

    def _purge_stale(self, original: Callable[[], None]) -> None:
        """Leave purging to the gate, which knows what must stay, unless the gate is broken."""
        service = self._service
        if service is None:
            original()
        elif service.broken:
            queue = self._manager.purge_queue

            def put(original_put: Callable[[Any], None], path: Any) -> None:
                if not service.protects(path):
                    original_put(path)

            undo = wrap_method(queue, "put", put)
            original()
            undo()

    def _train(self, original: Callable[[], None]) -> None:
        """Note a planned end, so that the next start goes on from the latest checkpoint."""
        original()
        if self._service is not None and not self._service.broken:
            self._service.settle()
            self._service.drain()
            self._service.stop(Failure.NONE)

    def _sweep(self) -> bool:
        clean = self._session.full_sweep(lambda: forward_backward(self._trainer))
        result = "clean" if clean else "not clean"
        logger.info(f"SCOUT: a replay of the whole catalogue on the newest state was {result}")
        return clean

    def _open(self) -> GateService:
        self._service = self._session.open_gate(self._manager.folder)
        return self._service

    def _path(self, step: int) -> str:
        return str(self._manager._create_checkpoint_id(step))


def forward_backward(trainer: Any) -> None:
    """Run one batch of fixed random tokens through the trainer, without touching its data."""
    training = trainer.job_config.training
    shape = (training.local_batch_size, training.seq_len + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(trainer.model_args.vocab_size, shape, generator=generator)
    tokens = tokens.to(trainer.device)
    trainer.forward_backward_step(
        input_dict={"input": tokens[:, :-1].contiguous()},
        labels=tokens[:, 1:].contiguous(),
        global_valid_tokens=float(training.local_batch_size * training.seq_len),
    )


def _outcome(save: Future[Any]) -> str | None:
    """Tell how an asynchronous save stands: None while it runs, "" when done, else the error."""
    if not save.done():
        return None
    error = save.exception()
    return "" if error is None else f"{type(error).__name__}: {error}"


def _known(step: int | None) -> int:
    assert step is not None  # only choices with a step are loaded
    return step
