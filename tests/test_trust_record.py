"""The trust record on disk: whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Label
from scout_core.decision.trust import Entry, File, Record
from scout_core.errors import ScoutError
from scout_core.integration.trust_record import PosixCalls, TrustStore, write_atomically

OLD, NEW = b"old content", b"the new content, longer"


def record(*steps: int) -> Record:
    entries = tuple(
        Entry(step, f"step-{step}", Label.UNPROVEN, files=(File("a", 1, "00"),)) for step in steps
    )
    return Record(CheckpointGate(2, ["nothing"]).state(), "job", checkpoints=entries)


class Crash(BaseException):
    """The machine stops here."""


@dataclass
class Inode:
    """A file: what the kernel holds, and what is certainly on the disk."""

    content: bytes = b""
    durable: bytes = b""


@dataclass
class SimulatedDisk:
    """System calls on a disk that may lose whatever was not synchronised, and crash at any call."""

    crash_at: int | None = None
    tear: bool = False  # the call that crashes is half done
    fail_write: bool = False
    names: dict[str, Inode] = field(default_factory=dict)
    durable_names: dict[str, Inode] = field(default_factory=dict)
    calls: int = 0
    handles: dict[int, Inode | None] = field(default_factory=dict)

    def _call(self) -> bool:
        """Count; return True when only half of the call is done before the crash."""
        self.calls += 1
        if self.calls - 1 == self.crash_at:
            if self.tear:
                return True
            raise Crash
        return False

    def open(self, path: str, flags: int, mode: int) -> int:
        torn = self._call()
        if not flags & os.O_DIRECTORY:
            inode = self.names.setdefault(path, Inode())
            inode.content = b"" if flags & os.O_TRUNC else inode.content
        if torn:
            raise Crash
        handle = len(self.handles) + 3
        self.handles[handle] = None if flags & os.O_DIRECTORY else self.names[path]
        return handle

    def write(self, handle: int, data: bytes) -> int:
        torn = self._call()
        if self.fail_write:
            raise OSError(errno.ENOSPC, "no space left on device")
        inode, part = self.handles[handle], data[: max(1, len(data) // 2)]
        assert inode is not None
        inode.content += part
        if torn:
            raise Crash
        return len(part)

    def fsync(self, handle: int) -> None:
        if self._call():
            raise Crash
        inode = self.handles[handle]
        if inode is None:
            self.durable_names = dict(self.names)
        else:
            inode.durable = inode.content

    def close(self, handle: int) -> None:
        if self._call():
            raise Crash

    def rename(self, old: str, new: str) -> None:
        torn = self._call()
        self.names[new] = self.names.pop(old)
        if torn:
            raise Crash

    def survivors(self, path: str) -> set[bytes]:
        """Everything that may be found at `path` after the power comes back."""
        found: set[bytes] = set()
        for names in (self.names, self.durable_names):
            inode = names[path]
            found |= {inode.durable}
            if inode.content != inode.durable:
                found |= {inode.content, inode.content[:3]}
        return found


def disk_with_old_content(path: str) -> SimulatedDisk:
    inode = Inode(OLD, OLD)
    return SimulatedDisk(names={path: inode}, durable_names={path: inode})


def crash_points() -> list[tuple[int, bool]]:
    disk = disk_with_old_content("/d/f")
    write_atomically(pathlib.Path("/d/f"), NEW, disk)
    return [(call, tear) for call in range(disk.calls) for tear in (False, True)]


@pytest.mark.parametrize(("call", "tear"), crash_points())
def test_a_power_loss_at_any_system_call_leaves_the_old_or_the_new(call: int, tear: bool) -> None:
    disk = disk_with_old_content("/d/f")
    disk.crash_at, disk.tear = call, tear
    with pytest.raises(Crash):
        write_atomically(pathlib.Path("/d/f"), NEW, disk)
    assert disk.survivors("/d/f") <= {OLD, NEW}


def test_when_writing_returns_the_new_content_survives_a_power_loss() -> None:
    disk = disk_with_old_content("/d/f")
    write_atomically(pathlib.Path("/d/f"), NEW, disk)
    assert disk.durable_names["/d/f"].durable == NEW


def test_a_full_disk_is_an_error_and_leaves_the_old() -> None:
    disk = disk_with_old_content("/d/f")
    disk.fail_write = True
    with pytest.raises(OSError, match="no space left"):
        write_atomically(pathlib.Path("/d/f"), NEW, disk)
    assert disk.survivors("/d/f") == {OLD}
    disk.fail_write = False
    write_atomically(pathlib.Path("/d/f"), NEW, disk)
    assert disk.survivors("/d/f") == {NEW}


KILLED_WRITER = """
import os, pathlib, signal, sys
from scout_core.integration.trust_record import PosixCalls, write_atomically

class Killed:
    left = 0
    def __getattr__(self, name):
        def call(*args):
            if Killed.left == 0:
                if name == "write":
                    os.write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            Killed.left -= 1
            return getattr(PosixCalls, name)(*args)
        return call

path = pathlib.Path(sys.argv[1])
for Killed.left in range(20):
    child = os.fork()
    if child == 0:
        write_atomically(path, b"new " * 1000 + str(Killed.left).encode(), Killed())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(Killed.left, os.WIFSIGNALED(status), path.read_bytes()[-12:].decode())
    if not os.WIFSIGNALED(status):
        break
"""


def test_a_writer_killed_at_any_system_call_leaves_the_old_or_the_new(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old " * 1000 + b"old")
    run = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    rows = [line.split(" ", 2) for line in run.stdout.splitlines()]
    assert [row[1] for row in rows] == ["True"] * (len(rows) - 1) + ["False"]
    calls = len(rows) - 1
    assert calls == 8  # open, write, fsync, close, rename; open, fsync, close of the folder
    for at, (_, _, tail) in enumerate(rows):
        assert ("old" if at < 5 else "new") in tail


def test_a_record_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    store = TrustStore(tmp_path)
    written = store.write(record(1, 2))
    assert store.load() == written
    assert replace(written, updated="") == record(1, 2)
    assert store.path.stat().st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 5000), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_changes_nothing(position: int, value: int) -> None:
    folder = pathlib.Path(os.environ["PYTEST_RECORD_FOLDER"])
    store = TrustStore(folder)
    original = store.write(record(1, 2))
    text = bytearray(store.path.read_bytes())
    text[position % len(text)] = value
    store.path.write_bytes(text)
    try:
        found = store.load()
    except ScoutError:
        return
    assert found == original


@settings(max_examples=30, deadline=None)
@given(length=st.integers(0, 2000))
def test_a_truncated_record_is_an_error_that_says_what_to_do(length: int) -> None:
    folder = pathlib.Path(os.environ["PYTEST_RECORD_FOLDER"])
    store = TrustStore(folder)
    store.write(record(1, 2))
    text = store.path.read_bytes()
    store.path.write_bytes(text[: length % (len(text) - 1)])
    with pytest.raises(ScoutError, match="scout ckpt rebuild"):
        store.load()


@pytest.fixture(autouse=True)
def record_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis runs a test body many times: the folder comes through the environment."""
    (tmp_path / "record").mkdir()
    monkeypatch.setenv("PYTEST_RECORD_FOLDER", str(tmp_path / "record"))


def test_a_missing_record_is_an_error_that_names_the_folder(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ScoutError, match=f"{tmp_path} holds no scout_trust.json"):
        TrustStore(tmp_path).load()


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"schema": "scout.trust/9"}'])
def test_another_file_is_not_taken_for_a_record(tmp_path: pathlib.Path, text: str) -> None:
    store = TrustStore(tmp_path)
    store.path.write_text(text)
    with pytest.raises(ScoutError, match="cannot be read"):
        store.load()


def test_writers_at_once_lose_nothing_and_readers_see_whole_records(
    tmp_path: pathlib.Path,
) -> None:
    store = TrustStore(tmp_path)
    store.write(record())
    sizes: list[int] = []
    done = threading.Event()

    def write(first: int) -> None:
        own = TrustStore(tmp_path)
        for step in range(first, first + 5):
            entry = Entry(step, f"step-{step}", Label.UNPROVEN)
            own.update(lambda before, entry=entry: before.with_entry(entry))

    def read() -> None:
        while not done.is_set():
            sizes.append(len(store.load().checkpoints))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(10 * i,)) for i in range(3)]
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
    done.set()
    reader.join(20)
    assert len(store.load().checkpoints) == 15
    assert sizes == sorted(sizes)


def test_a_writer_that_never_ends_is_an_error_in_time(tmp_path: pathlib.Path) -> None:
    store = TrustStore(tmp_path, lock_timeout_s=0.05)
    store.write(record())
    with open(tmp_path / ".scout_trust.lock") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(ScoutError, match="another process has been writing"):
            store.update(lambda before: before)
    assert store.update(lambda before: before).job == "job"


def test_a_failed_change_writes_nothing_and_gives_the_lock_back(tmp_path: pathlib.Path) -> None:
    store = TrustStore(tmp_path, lock_timeout_s=0.5)
    before = store.write(record(1))

    def fail(record: Record) -> Record:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        store.update(fail)
    assert store.load() == before
    assert store.update(lambda same: same).checkpoints == before.checkpoints


def test_the_system_calls_are_the_real_ones_by_default(tmp_path: pathlib.Path) -> None:
    assert PosixCalls.rename is os.replace
    write_atomically(tmp_path / "file", NEW)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]
