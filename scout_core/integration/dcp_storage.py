"""Write and read checkpoints with torch.distributed.checkpoint (DCP), on a group of SCOUT's own."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from scout_core.errors import ScoutError
from scout_core.integration.restore_state import StateDict, TrainingState, missing_names

Outcome = Callable[[float], str | None]
"""Of a write under way: waits that many seconds at most; None while it runs, "" when every rank's
files are complete, else what went wrong."""

# DCP's own error derives from BaseException (torch 2.13).
WRITE_ERRORS = (Exception, CheckpointException)


class Storage(Protocol):
    """Who writes checkpoints; all ranks call each method together."""

    def save(self, state_dict: StateDict, folder: pathlib.Path) -> None:
        """Write a checkpoint; return when every rank's files are complete, or raise."""

    def async_save(self, state_dict: StateDict, folder: pathlib.Path) -> Outcome:
        """Begin to write; when this returns, the state may change."""

    def load(self, state_dict: StateDict, folder: pathlib.Path) -> None:
        """Read a checkpoint into the tensors and stateful objects of `state_dict`."""

    def load_into(self, target: TrainingState, folder: pathlib.Path) -> StateDict:
        """Read a checkpoint into a model and its optimizer; return what belongs to neither."""

    def close(self) -> None:
        """Give back what it holds."""


class DcpStorage:
    """DCP to a file system. Its collectives never meet training's, not even from a thread."""

    def __init__(self, timeout_s: float) -> None:
        """Create the group; collective.

        Args:
            timeout_s: deadline of one collective of a save or load.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def save(self, state_dict: StateDict, folder: pathlib.Path) -> None:
        writer = FileSystemWriter(folder)
        save(state_dict, storage_writer=writer, process_group=self._group)

    def async_save(self, state_dict: StateDict, folder: pathlib.Path) -> Outcome:
        writer = FileSystemWriter(folder)
        running = async_save(state_dict, storage_writer=writer, process_group=self._group)
        assert isinstance(running, Future)
        return lambda wait_s: _outcome(running, wait_s)

    def load(self, state_dict: StateDict, folder: pathlib.Path) -> None:
        """Read a checkpoint.

        Raises:
            ScoutError: the checkpoint holds values that `state_dict` does not ask for.
        """
        reader = FileSystemReader(folder)
        forgotten = missing_names(state_dict, reader.read_metadata())
        if forgotten:
            raise ScoutError(
                f"{folder} holds {len(forgotten)} values that the state_dict to restore does not "
                f"ask for, among them {forgotten[:3]}; build it as it was saved (an optimizer has "
                "no state before its first step), or restore without a state_dict"
            )
        load(state_dict, storage_reader=reader, process_group=self._group)

    def load_into(self, target: TrainingState, folder: pathlib.Path) -> StateDict:
        """Read a checkpoint whatever its layout.

        Raises:
            ScoutError: the layout cannot be told from its names.
        """
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        values = target.template(metadata)
        load(values, storage_reader=reader, process_group=self._group)
        return target.apply(values, metadata)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def describe(error: BaseException) -> str:
    """Say in one line what went wrong."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[:500]


def _outcome(running: Future[Any], wait_s: float) -> str | None:
    try:
        running.result(wait_s)
    except TimeoutError:
        return None
    except WRITE_ERRORS as error:
        return describe(error)
    return ""
