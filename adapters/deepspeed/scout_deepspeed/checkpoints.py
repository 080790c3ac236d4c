"""The checkpoint gate in DeepSpeed's own protocol: `latest` waits until a checkpoint is proven.

DeepSpeed lets a "decoupled" checkpoint engine finish a save later: it writes the files at once, and
commits and names them in `latest` when the engine's `get_commit_info()` returns them. SCOUT wraps
the checkpoint engine that is there, and returns a checkpoint when the gate has proven it (Algorithm
3: one complete clean cycle before it and one after it). A save during a corruption or a hang is
not taken. `load_checkpoint` without a tag loads what the gate chooses; with a tag it obeys.
Universal checkpoints are left alone. Checked with deepspeed 0.19.8.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pathlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)

from scout_core.decision.labels import Failure, Label
from scout_core.evidence.capture import Undo
from scout_core.evidence.exchange import GroupExchange
from scout_core.integration.gate_service import GateService
from scout_core.integration.restoring import no_trusted_checkpoint
from scout_core.integration.session import Session
from scout_core.integration.trust_record import TrustStore
from scout_core.integration.wrapping import wrap_method
from scout_deepspeed.block import Block

LATEST = "latest"
_NOT_TAKEN = (Label.CONDEMNED, Label.REFUSED)


class CheckpointGate:
    """Stands between one engine and the folder it saves to. Its methods run on all ranks alike."""

    def __init__(self, engine: Any, session: Session, block: Block) -> None:
        """Prepare; the record of a folder is opened by the first save or load there."""
        self._engine = engine
        self._session = session
        self._block = block
        self._service: GateService | None = None
        self._withheld: list[CheckpointCommitInfo] = []
        self._saving = False
        self._resumed: tuple[int, str] | None = None
        """Step and path of what was loaded before any folder was opened."""

    def install(self) -> list[Undo]:
        """Put the gate in place and return what takes it away."""
        engine = self._engine
        inner = engine.checkpoint_engine
        engine.checkpoint_engine = WithholdingEngine(inner, self)

        at_exit = functools.partial(_finish, weakref.ref(self))
        atexit.register(at_exit)

        def put_back() -> None:
            atexit.unregister(at_exit)
            self.finish()
            engine.checkpoint_engine = inner

        return [
            put_back,
            wrap_method(engine, "save_checkpoint", self._save),
            wrap_method(engine, "load_checkpoint", self._load),
        ]

    @property
    def is_withholding(self) -> bool:
        """Some save is under way, or waits for its proof."""
        return self._saving or bool(self._withheld)

    def release(self) -> CheckpointCommitInfo | None:
        """Return a save that may be committed now; the same on all ranks."""
        if not self._withheld or self._saving:
            return None
        if not self._session.armed:
            released = self._withheld[-1]  # nothing will be proven any more: no gate
            self._withheld = []
            return released
        proven = None if self._service is None else self._service.proven
        tags = [info.tag for info in self._withheld]
        if proven is None or proven.path not in tags:
            return None
        place = tags.index(proven.path)
        released = self._withheld[place]
        del self._withheld[: place + 1]
        return released

    def commit_released(self) -> None:
        """Let DeepSpeed commit what is released: a PipelineEngine does not ask by itself."""
        if self._withheld:
            self._engine._commit_decoupled_checkpoint()

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        with self._session.phase("checkpoint"):
            service = self._opened_for_save(call.arguments["save_dir"])
            if service is None:
                return original(*call.args, **call.kwargs)
            tag = call.arguments["tag"]
            tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
            call.arguments["tag"] = tag
            step, path = self._session.step_count, str(service.folder / tag)
            label = service.begin_save(step, path).label
            if label in _NOT_TAKEN:
                self._session.note("save_refused", tag=tag, label=label.value)
                return False
            self._saving = True
            try:
                result = original(*call.args, **call.kwargs)
            finally:
                self._saving = False
            service.add_pending(step, path, lambda: "")
            service.settle()
            service.drain()
            info = CheckpointCommitInfo(
                tag, call.arguments["save_dir"], call.arguments["save_latest"]
            )
            self._withheld.append(info)
            return result

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        with self._session.phase("checkpoint"):
            folder = call.arguments["load_dir"]
            if not self._engine.load_universal_checkpoint() and self._has_record(folder):
                self._open(folder)
                if call.arguments["tag"] is None:
                    call.arguments["tag"] = self._chosen_tag(folder)
            result = original(*call.args, **call.kwargs)
            if result[0] is not None:
                self._went_on_from(result[0])
            return result

    def _opened_for_save(self, folder: str) -> GateService | None:
        """Return the gate of this folder; None where saves are not gated."""
        if not self._session.armed:
            return None
        if self._service is None:
            self._open(folder)
        service = self._service
        assert service is not None
        if service.folder != pathlib.Path(folder).absolute():
            self._session.note("save_not_gated", folder=str(folder), why="another folder is")
            return None
        if not service.has_resumed:
            step, path = self._resumed or (None, None)
            service.resumed(step, path)
        return service

    def _open(self, folder: str) -> None:
        if self._service is None:
            self._service = self._session.open_gate(folder)

    def _has_record(self, folder: str) -> bool:
        """Tell whether rank 0 sees a trust record; equal on all ranks."""
        mine = TrustStore(folder).exists()
        exchange = GroupExchange(torch.device("cpu"), self._block.exchange_timeout_s)
        parts = exchange.all_gather(bytes([mine]), tuple(range(exchange.world_size)))
        exchange.close()
        return bool(parts[0][0])

    def _chosen_tag(self, folder: str) -> str | None:
        """Return the tag that the gate chooses; None where there is nothing to choose from.

        Raises:
            ScoutError: there are checkpoints, and none can be trusted.
        """
        service = self._service
        assert service is not None
        if service.folder != pathlib.Path(folder).absolute():
            return None
        accept = self._block.accept_uncertified
        chosen = service.choose(accept_uncertified=accept)
        if chosen.choice.path is not None:
            return pathlib.Path(chosen.choice.path).name
        if not chosen.num_checkpoints:
            return None
        raise no_trusted_checkpoint(
            service,
            chosen,
            "say what happened with SCOUT_FAILURE=..., answer for uncertified ones with "
            '"accept_uncertified": true, or name a tag: load_checkpoint(dir, tag=...)',
        )

    def _went_on_from(self, load_path: str) -> None:
        """Training goes on from what DeepSpeed loaded."""
        step, path = self._engine.global_steps, str(pathlib.Path(load_path).absolute().parent)
        self._withheld = []
        if self._service is not None:
            self._service.resumed(step, path)
        else:
            self._resumed = step, path
        self._session.resume_at(step)

    def finish(self) -> None:
        """At a planned end, name in `latest` the newest checkpoint that nothing speaks against."""
        crashed = sys.is_finalizing() or hasattr(sys, "last_value")
        service, withheld = self._service, self._withheld
        if service is None or crashed or service.broken:
            return
        choice = service.stop(Failure.NONE)
        named = [info for info in withheld if str(service.folder / info.tag) == choice.path]
        if named and service.rank == 0 and named[0].save_latest:
            (pathlib.Path(named[0].save_dir) / LATEST).write_text(named[0].tag)
        self._withheld = []


def _finish(gate: weakref.ref[CheckpointGate]) -> None:
    living = gate()
    if living is not None:
        living.finish()


class WithholdingEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """The checkpoint engine that was there, except that the gate decides when a save is named."""

    def __init__(self, inner: CheckpointEngine, gate: CheckpointGate) -> None:
        super().__init__()
        self.name = inner.name
        self._inner = inner
        self._gate = gate

    def create(self, info: CheckpointCommitInfo) -> Any:
        return self._inner.create(info)

    def save(self, state_dict: Any, path: str) -> Any:
        return self._inner.save(state_dict=state_dict, path=path)

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> Any:
        return self._inner.makedirs(path, exist_ok=exist_ok)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._inner.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> Any:
        return self._inner.commit(info)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._inner.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        return bool(self._inner.preserves_storage_sharing())

    def is_decoupled(self) -> bool:
        return self._gate.is_withholding

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        return self._gate.release()

    def cleanup(self) -> Any:
        return None  # DeepSpeed calls it for decoupled engines only, and the inner one is not
