"""What a silent trainer is doing, as seen from outside: through /proc and a pidfd, never ptrace.

# Note [Who holds the GIL]
A healthy interpreter answers a stack request within milliseconds. When the answer stays out, the
helper thread that should give it is looked at: a thread that waits for the GIL wakes up every 5 ms
to ask for it again, so its context switches go on counting. An interpreter that runs bytecode
gives the GIL up when asked; one that does not is inside one native call that keeps it. A helper
whose counter stands still was not scheduled at all, and nothing is concluded.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from typing import Final, NamedTuple

from scout_core.decision.snapshots import ProcessState

_STOPPED: Final = "Tt"
_UNINTERRUPTIBLE: Final = "D"
GIL_REQUESTS: Final = 8  # wake-ups of the helper that prove that it asks and is not given the GIL

# struct pidfd_info and ioctl PIDFD_GET_INFO of Linux 6.15: the exit status outlives the process.
_PIDFD_INFO_BYTES: Final = 64
_PIDFD_INFO_EXIT: Final = 1 << 3
_PIDFD_GET_INFO: Final = (3 << 30) | (_PIDFD_INFO_BYTES << 16) | (0xFF << 8) | 11
_EXIT_STATUS_AT: Final = 60
_STAT_EXIT_STATUS: Final = 49  # field 52 of /proc/PID/stat, counted from the state


class Thread(NamedTuple):
    """One thread at one moment."""

    state: str  # "R", "S", "D", "T", ...
    ticks: int  # CPU time used, in clock ticks
    switches: int  # how often it gave the CPU up by itself
    waits_in: str  # kernel function it sleeps in; "" when unknown or running


class Activity(NamedTuple):
    """What a thread did between two looks at it."""

    state: ProcessState
    running: bool  # it used CPU time
    asleep: bool  # it slept in the same place all the time
    waits_in: str


def look(pid: int, tid: int) -> Thread | None:
    """Look at a thread; None when it is gone."""
    folder = f"/proc/{pid}/task/{tid}"
    try:
        fields = _read(f"{folder}/stat").rpartition(")")[2].split()
        status = _read(f"{folder}/status")
    except OSError:
        return None
    switches = status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]
    return Thread(
        state=fields[0],
        ticks=int(fields[11]) + int(fields[12]),
        switches=int(switches),
        waits_in=_wait_channel(folder),
    )


def compare(before: Thread | None, after: Thread | None) -> Activity:
    """Say what a thread did between two looks."""
    if after is None:
        return Activity(ProcessState.UNKNOWN, running=False, asleep=False, waits_in="")
    still = before is not None and before.switches == after.switches
    return Activity(
        state=_process_state(before, after),
        running=before is not None and after.ticks > before.ticks,
        asleep=still and after.state == "S" and before is not None and before.state == "S",
        waits_in=after.waits_in,
    )


def holds_gil(before: Thread | None, after: Thread | None) -> bool:
    """Tell from two looks at a helper that does not answer whether the GIL is kept from it."""
    if before is None or after is None:
        return False
    return after.switches - before.switches >= GIL_REQUESTS


def has_ended(pidfd: int) -> bool:
    """Tell whether the process of a pidfd has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def exit_code(pidfd: int, pid: int) -> int | None:
    """Return the exit code of an ended process as `subprocess` counts; None when unknown.

    A kernel before 6.15 tells it only until the parent has collected it.
    """
    status = _status_of_pidfd(pidfd)
    if status is None:
        status = _status_of_zombie(pid)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _status_of_pidfd(pidfd: int) -> int | None:
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("@Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    known = struct.unpack_from("@Q", info, 0)[0] & _PIDFD_INFO_EXIT
    return int(struct.unpack_from("@i", info, _EXIT_STATUS_AT)[0]) if known else None


def _status_of_zombie(pid: int) -> int | None:
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[_STAT_EXIT_STATUS]) if fields[0] in "ZX" else None


def _process_state(before: Thread | None, after: Thread) -> ProcessState:
    if after.state in _STOPPED:
        return ProcessState.STOPPED
    stuck = before is not None and before.state == after.state == _UNINTERRUPTIBLE
    if stuck and before is not None and before.switches == after.switches:
        return ProcessState.UNINTERRUPTIBLE
    return ProcessState.ALIVE


def _wait_channel(folder: str) -> str:
    try:
        name = _read(f"{folder}/wchan")
    except OSError:
        return ""
    return "" if name == "0" else name


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
