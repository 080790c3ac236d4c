"""The checkpoint gate around Megatron's own saves and loads (Algorithm 3).

Megatron writes `iter_NNNNNNN` folders and names the newest one in a tracker file. With SCOUT each
save is labelled by the gate, and not taken during a corruption; a checkpoint that the gate may need
is not deleted; and a restart loads what the gate chooses, by `--ckpt-step`, instead of what the
tracker names. An explicit `--ckpt-step` is obeyed. Checked with megatron.training 0.17.1 - 0.19.0.
"""

from __future__ import annotations

import argparse
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from megatron.training.checkpointing import get_checkpoint_name

from scout_core.decision.labels import Choice, Failure, Label
from scout_core.integration.gate_service import GateService
from scout_core.integration.restoring import no_trusted_checkpoint, restore
from scout_core.integration.session import Session
from scout_core.report.events import print_line

_NOT_TAKEN = (Label.CONDEMNED, Label.REFUSED)


class CheckpointGate:
    """Gates one folder, that of `--save`. Its methods run on all ranks alike."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        """Open the trust record; collective.

        Raises:
            ScoutError: the record cannot be read.
        """
        self._args = args
        self._session = session
        self._service: GateService = session.open_gate(args.save)
        self._saves: dict[int, list[str]] = {}

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take a save if it may be taken, and label it once it is complete."""
        call = inspect.signature(original).bind(*args, **kwargs)
        if call.arguments.get("non_persistent_ckpt") or not self._session.armed:
            return original(*args, **kwargs)  # switched off, SCOUT proves and refuses nothing
        step, service = int(call.arguments["iteration"]), self._service
        if not service.has_resumed:
            service.resumed(None)
        path = self._folder(step)
        label = service.begin_save(step, path).label
        if label in _NOT_TAKEN:
            self._session.note("save_refused", iteration=step, label=label.value)
            self._say(f"the save of iteration {step} is not taken: it would be {label.value}")
            return None
        self._saves[step] = []
        result = original(*args, **kwargs)
        if not self._args.async_save:
            self._saves[step].append("")
        ended = self._saves[step]
        service.add_pending(step, path, lambda: ended[0] if ended else None)
        service.settle()
        return result

    def finish_later(self, request: Any) -> None:
        """Let an asynchronous save tell when its files are complete on this rank."""
        for ended in self._saves.values():
            if not ended:
                request.add_finalize_fn(lambda ended=ended: ended.append(""))

    def load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load what the gate chooses, and go on from there.

        Raises:
            ScoutError: there are checkpoints, and none can be trusted.
        """
        result = None
        if self._args.ckpt_step is None and self._loads_what_it_saves():
            result = self._load_chosen(lambda: original(*args, **kwargs))
        if result is None:
            result = original(*args, **kwargs)
            step = int(result[0])
            self._service.resumed(step or None, self._folder(step) if step else None)
        self._session.resume_at(int(result[0]))
        return result

    def _load_chosen(self, load: Callable[[], Any]) -> Any:
        """Load the gate's choice; None where it knows of no checkpoint."""
        loaded: list[Any] = []

        def take(choice: Choice) -> None:
            self._say(f"starting from the {choice.choice} checkpoint {choice.path}")
            self._args.ckpt_step = choice.step
            loaded.append(load())
            self._args.ckpt_step = None

        accept = self._args.scout_accept_uncertified
        chosen = restore(self._service, take, accept_uncertified=accept)
        if chosen.num_checkpoints and not loaded:
            way_out = (
                "say what happened with SCOUT_FAILURE=..., answer for uncertified ones with "
                "--scout-accept-uncertified, or name one: --ckpt-step"
            )
            raise no_trusted_checkpoint(self._service, chosen, way_out)
        return loaded[-1] if loaded else None

    def keeps(self, folder: str, iteration: int) -> bool:
        """Tell whether this checkpoint must not be deleted; called on rank 0."""
        path = get_checkpoint_name(folder, iteration, return_base_dir=True)
        return self._service.protects(str(pathlib.Path(path).absolute()))

    def finish(self) -> None:
        """Note that training came to its planned end."""
        if not self._service.broken:
            self._service.drain()
            self._service.stop(Failure.NONE)

    def _folder(self, iteration: int) -> str:
        path = get_checkpoint_name(self._args.save, iteration, return_base_dir=True)
        return str(pathlib.Path(path).absolute())

    def _loads_what_it_saves(self) -> bool:
        load, save = self._args.load, self._args.save
        same = load is not None and pathlib.Path(load).absolute() == pathlib.Path(save).absolute()
        return same and not self._args.finetune

    def _say(self, text: str) -> None:
        if self._service.rank == 0:
            print_line(f"scout: {text}")
