"""`scout_trust.json`: the trust record on disk, beside the checkpoints.

Written by one process at a time, whole or not at all; readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import xxhash

from scout_core.decision.trust import Record
from scout_core.errors import ScoutError
from scout_core.report.events import now

RECORD = "scout_trust.json"
_LOCK = ".scout_trust.lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_POLL_S = 0.02


class FileCalls(Protocol):
    """The system calls that writing needs, so that a crash can be simulated at each of them."""

    def open(self, path: str, flags: int, mode: int) -> int: ...

    def write(self, handle: int, data: bytes) -> int: ...

    def fsync(self, handle: int) -> None: ...

    def close(self, handle: int) -> None: ...

    def rename(self, old: str, new: str) -> None: ...


class PosixCalls:
    """The real ones."""

    open = staticmethod(os.open)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)


def write_atomically(path: pathlib.Path, data: bytes, calls: FileCalls | None = None) -> None:
    """Put `data` at `path`: after a crash at any point, power loss included, the file holds either
    its former content or all of `data`.

    One writer at a time. A write that fails leaves the former content and a stray temporary file,
    which the next write takes over.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    calls = calls or PosixCalls()
    temporary = str(path.with_name(f".{path.name}.tmp"))
    handle = calls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        rest = data
        while rest:
            rest = rest[calls.write(handle, rest) :]
        calls.fsync(handle)
    finally:
        calls.close(handle)
    calls.rename(temporary, str(path))
    sync_folder(path.parent, calls)


def sync_folder(folder: pathlib.Path, calls: FileCalls | None = None) -> None:
    """Make renames inside the folder survive a power loss."""
    calls = calls or PosixCalls()
    handle = calls.open(str(folder), os.O_RDONLY | os.O_DIRECTORY, 0)
    try:
        calls.fsync(handle)
    finally:
        calls.close(handle)


class TrustStore:
    """The record of one folder of checkpoints."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        lock_timeout_s: float = 20.0,
        calls: FileCalls | None = None,
    ) -> None:
        """Touch nothing yet.

        Args:
            lock_timeout_s: how long to wait for another writer.
        """
        self.folder = pathlib.Path(folder)
        self.path = self.folder / RECORD
        self._lock_timeout_s = lock_timeout_s
        self._calls = calls or PosixCalls()

    def exists(self) -> bool:
        """Tell whether there is a record, readable or not."""
        return self.path.exists()

    def load(self) -> Record:
        """Read the record; needs no lock.

        Raises:
            ScoutError: there is none, or it cannot be read; nothing is guessed.
        """
        try:
            plain = json.loads(self.path.read_bytes())
            if plain.pop("digest") != _digest(plain):
                raise ValueError("its content and its digest differ")
        except FileNotFoundError:
            raise ScoutError(
                f"{self.folder} holds no {RECORD}, so nothing is known about its checkpoints; "
                "name the folder that was given to session.checkpoint(), or make a record with "
                "`scout ckpt rebuild`"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScoutError(
                f"the trust record {self.path} cannot be read ({error}); no checkpoint is trusted "
                "without it; `scout ckpt rebuild` makes a new one in which all are uncertified"
            ) from error
        return Record.from_json(plain, str(self.path))

    def write(self, record: Record) -> Record:
        """Put a record in the place of whatever is there.

        Raises:
            ScoutError: the lock is not to be had.
            OSError: the file cannot be written.
        """
        with self._locked():
            return self._put(record)

    def update(self, change: Callable[[Record], Record]) -> Record:
        """Read, change and write as one step; return what was written.

        Raises:
            ScoutError: no record, an unreadable one, or the lock is not to be had.
            OSError: the file cannot be written.
        """
        with self._locked():
            return self._put(change(self.load()))

    def _put(self, record: Record) -> Record:
        stamped = replace(record, updated=now())
        plain = json.loads(json.dumps(stamped.to_json()))
        text = json.dumps({**plain, "digest": _digest(plain)}, indent=1) + "\n"
        write_atomically(self.path, text.encode(), self._calls)
        return stamped

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(handle)
            yield
        finally:
            os.close(handle)  # gives the lock back, as does the end of the process

    def _wait_for(self, handle: int) -> None:
        deadline = time.monotonic() + self._lock_timeout_s
        pause = threading.Event()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ScoutError(
                        f"another process has been writing {self.path} for "
                        f"{self._lock_timeout_s} s; try again when it is done"
                    ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                raise ScoutError(
                    f"the file system of {self.folder} has no file locks ({error.strerror}); "
                    "mount it with them (Lustre: -o flock), or use another folder"
                ) from None
            pause.wait(_POLL_S)


def _digest(plain: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())
