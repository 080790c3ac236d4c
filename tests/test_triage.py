"""What a process is doing, told from outside."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.snapshots import ProcessState
from scout_core.evidence.stack import (
    frames_in_dump,
    frames_of_thread,
    is_compiling,
    line_to_look_at,
)
from scout_core.observer import triage
from scout_core.observer.triage import GIL_REQUESTS, Activity, Thread

DEADLINE_S = 20.0


@contextmanager
def process(code: str) -> Iterator[int]:
    """Run Python code in a process of its own, which is killed at the end."""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def watch(pid: int, seen: object, between_s: float = 0.1) -> Activity:
    """Look twice, again and again, until the activity satisfies `seen`."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        before = triage.look(pid, pid)
        time.sleep(between_s)
        activity = triage.compare(before, triage.look(pid, pid))
        assert callable(seen)
        if seen(activity) or time.monotonic() > deadline:
            return activity


def test_a_sleeping_process_is_alive_asleep_and_in_nanosleep() -> None:
    with process("import time; time.sleep(99)") as pid:
        found = watch(pid, lambda a: a.asleep and "nanosleep" in a.waits_in)
    assert (found.state, found.asleep, found.running) == (ProcessState.ALIVE, True, False)
    assert "nanosleep" in found.waits_in


def test_a_process_that_waits_for_a_lock_is_in_a_futex() -> None:
    with process("import threading; threading.Event().wait()") as pid:
        found = watch(pid, lambda a: a.asleep and "futex" in a.waits_in)
    assert "futex" in found.waits_in


def test_a_spinning_process_runs() -> None:
    with process("while True: pass") as pid:
        found = watch(pid, lambda a: a.running)
    assert (found.state, found.running, found.asleep) == (ProcessState.ALIVE, True, False)


def test_a_stopped_process_is_stopped_and_goes_on() -> None:
    with process("while True: pass") as pid:
        os.kill(pid, signal.SIGSTOP)
        assert watch(pid, lambda a: a.state is ProcessState.STOPPED).state is ProcessState.STOPPED
        os.kill(pid, signal.SIGCONT)
        assert watch(pid, lambda a: a.running).state is ProcessState.ALIVE


def test_a_process_that_cannot_be_interrupted_is_named_so() -> None:
    """A parent in vfork waits in state D until its child lets go."""
    code = (
        "import ctypes, os, time\n"
        "if ctypes.CDLL(None).vfork() == 0:\n"
        "    time.sleep(3)\n"
        "    os._exit(0)\n"
    )
    with process(code) as pid:
        found = watch(pid, lambda a: a.state is ProcessState.UNINTERRUPTIBLE)
    assert found.state is ProcessState.UNINTERRUPTIBLE


def test_a_process_that_is_gone_cannot_be_looked_at() -> None:
    with process("pass") as pid:
        pass
    assert triage.look(pid, pid) is None
    assert triage.compare(None, None).state is ProcessState.UNKNOWN


@pytest.mark.parametrize(
    ("code", "expected"),
    [("", 0), ("import os; os._exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_the_exit_code_is_known_before_the_parent_collects_it(code: str, expected: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", code])
    pidfd = os.pidfd_open(child.pid)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert triage.has_ended(pidfd)
    assert triage.exit_code(pidfd, child.pid) == expected
    child.wait()
    os.close(pidfd)


def test_the_exit_code_of_a_collected_process_is_right_or_unknown() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"])
    pidfd = os.pidfd_open(child.pid)
    assert not triage.has_ended(pidfd)
    child.wait()
    assert triage.exit_code(pidfd, child.pid) in (3, None)  # None before Linux 6.15
    os.close(pidfd)


@given(st.integers(0, 10**6), st.integers(0, 100))
def test_only_a_helper_that_asks_again_and_again_proves_that_the_gil_is_kept(
    switches: int, more: int
) -> None:
    before = Thread("S", 0, switches, "futex_wait")
    after = before._replace(switches=switches + more)
    assert triage.holds_gil(before, after) == (more >= GIL_REQUESTS)
    assert not triage.holds_gil(None, after)
    assert not triage.holds_gil(before, None)


# Stacks


def innermost(release: threading.Event, ready: threading.Event) -> None:
    ready.set()
    release.wait(DEADLINE_S)


@contextmanager
def waiting_thread() -> Iterator[int]:
    """A thread that waits in `innermost`; yields its ident."""
    release, ready = threading.Event(), threading.Event()
    thread = threading.Thread(target=innermost, args=(release, ready))
    thread.start()
    ready.wait(DEADLINE_S)
    assert thread.ident is not None
    yield thread.ident
    release.set()
    thread.join(DEADLINE_S)


def test_a_live_stack_and_a_dumped_one_say_the_same() -> None:
    with waiting_thread() as ident, tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        live = frames_of_thread(ident)
        file.seek(0)
        dumped = frames_in_dump(file.read(), ident)
    assert dumped == live
    assert line_to_look_at(live, ()).startswith(__file__)
    assert line_to_look_at(live, ()).endswith(" innermost")


def test_the_newest_of_several_dumps_counts() -> None:
    old, new = (
        f'Thread 0x00007f01 (most recent call first):\n  File "a.py", line {n} in f\n'
        f'Thread 0x00007f02 (most recent call first):\n  File "b.py", line {n} in g\n'
        for n in (1, 2)
    )
    assert frames_in_dump(old + new, 0x7F01) == ["a.py:2 f"]
    assert frames_in_dump(old + new, 0x7F03) == []


def test_the_line_to_look_at_is_the_users() -> None:
    stack = ["/lib/torch/nn.py:1 wait", "/lib/torch/dist.py:2 all_reduce", "/home/train.py:3 step"]
    assert line_to_look_at(stack, ("/lib/torch/",)) == "/home/train.py:3 step"
    assert line_to_look_at(stack[:2], ("/lib/torch/",)) == "/lib/torch/nn.py:1 wait"
    assert line_to_look_at([], ()) == ""


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("/x/torch/_inductor/codecache.py:10 load", True),
        ("/x/torch/_dynamo/eval_frame.py:10 inner", True),
        ("/x/kernels.py:10 compile", True),
        ("/x/kernels.py:10 recompile_all", False),
        ("/x/compile.py:10 step", False),
    ],
)
def test_a_stack_tells_whether_it_compiles(frame: str, expected: bool) -> None:
    assert is_compiling(["/x/other.py:1 f", frame]) == expected
