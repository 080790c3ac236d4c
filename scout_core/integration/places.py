"""Where checkpoints lie: a folder in memory that all ranks see, and half-written ones beside it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable

import xxhash

from scout_core.integration import manifest
from scout_core.integration.gate_service import GateService
from scout_core.integration.manifest import Share
from scout_core.integration.record_keeper import Emit

_MEMORY = pathlib.Path("/dev/shm")
_PROBE = "probe"


def partial(folder: pathlib.Path) -> pathlib.Path:
    """Return where a checkpoint is written before it is complete."""
    return folder.with_name(folder.name + ".partial")


def try_files(task: Callable[[], object]) -> str:
    """Do something with files and say what went wrong; empty when nothing did."""
    try:
        task()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def copy_share(source: pathlib.Path, target: pathlib.Path, share: Share) -> None:
    """Copy this share of a checkpoint's files, down to the disk.

    Raises:
        OSError: the disk is full, or a file cannot be read.
    """
    for file in manifest.list_files(source):
        if share.holds(file.name):
            at = target / file.name
            at.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file.name, at)
            with open(at, "rb") as stream:
                os.fsync(stream.fileno())


def shared_folder(service: GateService, wanted: str | None, emit: Emit) -> pathlib.Path | None:
    """Make the folder in memory for a job's latest checkpoint; collective.

    Args:
        wanted: folder in a memory file system; "" wants none, None takes /dev/shm.

    Returns:
        None when none is wanted, or the ranks do not all see the same one (several machines);
        then the latest checkpoint goes to disk like the others.
    """
    if wanted == "":
        return None
    root = pathlib.Path(wanted) if wanted else _MEMORY / f"scout-{os.getuid()}"
    folder = root / xxhash.xxh3_64_hexdigest(str(service.folder).encode())
    probe = folder / _PROBE
    mark = f"{time.time_ns()} {os.getpid()}"
    error = try_files(lambda: _leave(probe, mark)) if service.rank == 0 else ""
    parts = service.tell("memory made", {"mark": mark, "error": error})
    wrong = "no agreement" if parts is None else parts[0]["error"]
    if parts is not None and not wrong:
        seen = probe.exists() and probe.read_text() == parts[0]["mark"]
        wrong = service.first_error("memory seen", "" if seen else "ranks see different memory")
    if wrong:
        emit("memory_checkpoints_off", why=wrong)
        return None
    return folder


def release(folder: pathlib.Path) -> None:
    """Give the folder in memory back, unless something still lies in it."""
    (folder / _PROBE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: a pinned checkpoint, or another job's folder
        folder.rmdir()
        folder.parent.rmdir()


def _leave(probe: pathlib.Path, mark: str) -> None:
    probe.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    probe.parent.mkdir(exist_ok=True, mode=0o700)
    probe.write_text(mark)
