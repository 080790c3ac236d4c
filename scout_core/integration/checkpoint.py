"""`session.checkpoint(folder)`: save and restore through the gate (Algorithm 3).

The latest checkpoint lies in memory, where it survives the processes; once per cycle one is written
to disk. What may be trusted, kept or chosen is the gate's to say.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from scout_core.config import CheckpointConfig, ScoutConfig
from scout_core.decision.labels import Choice, Failure, Label, Saved
from scout_core.evidence.exchange import Exchange
from scout_core.integration.dcp_storage import (
    WRITE_ERRORS,
    DcpStorage,
    Outcome,
    Storage,
    describe,
)
from scout_core.integration.gate_service import GateService
from scout_core.integration.manifest import Share
from scout_core.integration.places import copy_share, partial, release, shared_folder, try_files
from scout_core.integration.record_keeper import Emit
from scout_core.integration.restore_state import StateDict, TrainingState
from scout_core.integration.restoring import no_trusted_checkpoint, restore
from scout_core.integration.saves import Ended, Job, Purge
from scout_core.integration.trust_record import sync_folder

_NOT_TAKEN = (Label.CONDEMNED, Label.REFUSED)


Phase = Callable[[str], AbstractContextManager[None]]


def _no_phase(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class GatedCheckpoint:
    """Saves and restores a job's state. All ranks call every method together.

    Steps are optimizer steps as the session counts them, and rise from save to save.
    """

    def __init__(
        self,
        service: GateService,
        storage: Storage,
        config: CheckpointConfig,
        target: TrainingState,
        emit: Emit,
        save_timeout_s: float,
        phase: Phase = _no_phase,
    ) -> None:
        """Find out whether the ranks share a memory folder, and clear what a kill left half done.

        Args:
            target: what `restore()` fills when it is given no state dict.
            save_timeout_s: how long an asynchronous save may take.
            phase: tells the hang observer that a save or load is under way; `Session.phase`.
        """
        self.service = service
        self.restored: StateDict = {}
        """Entries of the restored checkpoint that belong to neither model nor optimizer."""
        self._storage = storage
        self._purge = Purge(config.keep_last, shutil.rmtree)
        self._target = target
        self._emit = emit
        self._save_timeout_s = save_timeout_s
        self._phase = phase
        self._running: list[Outcome] = []
        self._closed = False
        self._memory = shared_folder(service, config.memory_dir, emit)
        if service.rank == 0:
            for folder in self._folders():
                for left in folder.glob("step-*.partial"):
                    shutil.rmtree(left)

    def save(self, step: int, state_dict: StateDict) -> Label:
        """Write a checkpoint and return its label; REFUSED and CONDEMNED ones are not written.

        Raises:
            ScoutError: the folder holds an earlier run; restore first.
            Exception: whatever the storage raised. The checkpoints before stay as they were.
        """
        with self._phase("checkpoint"):
            return self._save(step, state_dict)

    def async_save(self, step: int, state_dict: StateDict) -> Label:
        """Begin to write a checkpoint; return the label it would have now.

        It counts once it is complete on every rank, which the next check, save, `wait` or
        `restore` notices. An earlier save that still runs is waited for.

        Raises:
            ScoutError: the folder holds an earlier run; restore first.
        """
        with self._phase("checkpoint"):
            return self._begin_async(step, state_dict)

    def _save(self, step: int, state_dict: StateDict) -> Label:
        label, folder = self._begin(step)
        if folder is None:
            return label
        error: BaseException | None = None
        try:
            self._storage.save(state_dict, partial(folder))
            self._complete(folder)
        except WRITE_ERRORS as raised:
            error = raised
        told = "" if error is None else describe(error)
        self.service.add_pending(step, str(folder), lambda: told)
        ended = self.service.settle(self._purge)
        failed = ended[-1].error if ended else told
        self._clear_failed(ended)
        if failed and self._is_in_memory(str(folder)):
            self._leave_memory(failed)
            return self._save(step, state_dict)
        if failed:
            raise error or RuntimeError(f"the save of step {step} failed: {failed}")
        return ended[-1].label if ended else label

    def _begin_async(self, step: int, state_dict: StateDict) -> Label:
        label, folder = self._begin(step)
        if folder is None:
            return label
        running = self._storage.async_save(state_dict, partial(folder))
        text: list[str] = []

        def outcome(wait_s: float) -> str | None:
            if not text:
                told = running(wait_s)
                if told is None:
                    return None
                text.append(told or try_files(lambda: self._complete(folder)))
            return text[0]

        self._running.append(outcome)
        self.service.add_pending(step, str(folder), lambda: outcome(0.0))
        return label

    def wait(self) -> list[Ended]:
        """Wait for asynchronous saves; return those that ended since the last call.

        Raises:
            RuntimeError: one did not end in time on some rank.
        """
        if not self._running:
            return []
        for outcome in self._running:
            outcome(self._save_timeout_s)
        ended = self.service.settle(self._purge)
        self._running = []
        self._clear_failed(ended)
        if self.service.pending and not self.service.broken:
            raise RuntimeError(f"{self.service.pending[0].path} was not complete in time")
        return ended

    def restore(
        self,
        failure: Failure | str | None = None,
        state_dict: StateDict | None = None,
        *,
        sweep: Callable[[], bool] | None = None,
        start_over: bool = False,
        accept_uncertified: bool = False,
    ) -> int:
        """Load the checkpoint that the evidence allows, and return its step; 0 for a new run.

        Args:
            failure: why the job starts again: "sdc", "straggler", "hang", "unreachable", "unknown"
                or "none" (a planned stop). None takes $SCOUT_FAILURE, or what the record says.
            state_dict: tensors and stateful objects to fill; None fills model and optimizer and
                leaves everything else in `restored`.
            sweep: replays the whole catalogue and tells whether it was clean, job-wide; decides
                after a hang or an unknown failure. Without it such a job goes back to the proven.
            start_over: return 0 where nothing can be trusted, instead of raising.
            accept_uncertified: a person answers for checkpoints that could not be certified.

        Raises:
            NoTrustedCheckpoint: there are checkpoints, but none to start from.
            ScoutError: an unknown failure, or a state dict that leaves values out.
        """
        with self._phase("checkpoint"):
            self.wait()
            return self._restore(failure, state_dict, sweep, start_over, accept_uncertified)

    def close(self, planned: bool = True) -> None:
        """End the run, once; after a planned stop the next one goes on from the latest checkpoint.

        The latest is copied from memory to disk then, and the memory is given back.
        """
        if self._closed:
            return
        self._closed = True
        if planned and not self.service.broken:
            with self._phase("checkpoint"):
                self.wait()
                self._persist([self.service.latest])
                self.service.drain()
                self.service.stop(Failure.NONE)
                self.service.settle(self._purge)
        self.service.close()
        self._storage.close()
        if planned and self._memory is not None and self.service.rank == 0:
            release(self._memory)

    def _begin(self, step: int) -> tuple[Label, pathlib.Path | None]:
        """Agree on label and place; no place when the checkpoint must not be taken."""
        self.wait()
        self._persist(self.service.proven_or_candidate())
        name = self._fresh_name(step) if self.service.rank == 0 else ""
        label, name = self.service.begin_save(step, name)
        if label in _NOT_TAKEN:
            self._emit("save_refused", label=label.value)
            return label, None
        place = self.service.folder
        if self._memory is not None and label is Label.UNPROVEN:
            place = self._memory
        return label, place / name

    def _fresh_name(self, step: int) -> str:
        """Name a folder that neither exists nor stood in the record before."""
        name, tries = f"step-{step:08d}", 0
        while any((folder / name).exists() for folder in self._folders()):
            tries += 1
            name = f"step-{step:08d}.{tries}"
        return name

    def _complete(self, folder: pathlib.Path) -> None:
        """Give a checkpoint its name: from then on it is known to be complete."""
        if self.service.rank == 0:
            os.rename(partial(folder), folder)
            sync_folder(folder.parent)

    def _restore(
        self,
        failure: Failure | str | None,
        state_dict: StateDict | None,
        sweep: Callable[[], bool] | None,
        start_over: bool,
        accept_uncertified: bool,
    ) -> int:
        chosen = restore(
            self.service,
            lambda choice: self._load(choice, state_dict),
            failure,
            sweep,
            accept_uncertified,
        )
        if chosen.choice.step is not None:
            return chosen.choice.step
        if chosen.num_checkpoints and not start_over:
            raise no_trusted_checkpoint(self.service, chosen, "begin again with start_over=True")
        self.service.resumed(None)
        return 0

    def _load(self, choice: Choice, state_dict: StateDict | None) -> None:
        folder = pathlib.Path(str(choice.path))
        if state_dict is not None:
            self._storage.load(state_dict, folder)
            return
        self.restored = self._storage.load_into(self._target, folder)
        if self.restored:
            self._emit("not_restored", entries=sorted(self.restored))

    def _persist(self, wanted: Iterable[Saved | None]) -> None:
        paths = [saved.path for saved in wanted if saved is not None and saved.path is not None]
        in_memory = [path for path in paths if self._is_in_memory(path)]
        if in_memory:
            self.service.drain()  # the signatures go along
        for path in in_memory:
            why = self._persist_one(pathlib.Path(path))
            if why:
                self._emit("not_persisted", path=path, why=why)

    def _persist_one(self, source: pathlib.Path) -> str:
        """Copy a checkpoint from memory to disk, each rank its share; say why not, if not."""
        target = self.service.folder / source.name
        share = Share(self.service.rank, self.service.num_ranks)
        error = try_files(lambda: copy_share(source, partial(target), share))
        why = self.service.first_error("persist", error)
        if not why:
            error = try_files(lambda: self._complete(target))
            why = self.service.first_error("persisted", error)
        if not why:
            self.service.moved(str(source), str(target), shutil.rmtree)
        return why

    def _folders(self) -> list[pathlib.Path]:
        return [self.service.folder, *([self._memory] if self._memory else [])]

    def _is_in_memory(self, path: str) -> bool:
        return self._memory is not None and pathlib.Path(path).is_relative_to(self._memory)

    def _leave_memory(self, why: str) -> None:
        """Write to disk from now on: the memory is full, or cannot be written."""
        self._emit("memory_checkpoints_off", why=why)
        self._memory = None

    def _clear_failed(self, ended: Iterable[Ended]) -> None:
        for save in ended:
            if save.error and self.service.rank == 0:
                left = partial(self.service.folder / save.path)
                shutil.rmtree(left, ignore_errors=True)  # the next start clears what stays


class Manager(Storage, Protocol):
    """A framework's own checkpoint manager, made to write where SCOUT says."""

    @property
    def folder(self) -> str | os.PathLike[str]:
        """Where its checkpoints and the trust record lie; all ranks see it."""


def open_checkpoint(
    place: str | os.PathLike[str] | Manager,
    exchange: Exchange,
    job: Job,
    config: ScoutConfig,
    target: TrainingState,
    emit: Emit,
    phase: Phase = _no_phase,
) -> GatedCheckpoint:
    """Open a folder of DCP checkpoints, or a manager's, for a job; collective.

    Raises:
        ScoutError: the folder's record cannot be read.
    """
    timeout_s = config.hang.checkpoint_timeout_s
    if isinstance(place, str | os.PathLike):
        service = GateService(place, exchange, job, emit)
        storage: Storage = DcpStorage(timeout_s)
    else:
        service = GateService(place.folder, exchange, job, emit)
        storage = place
    return GatedCheckpoint(service, storage, config.checkpoint, target, emit, timeout_s, phase)
