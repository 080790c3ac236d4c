"""One trainer of the node, as its agent sees it: silent, dead, or asked what it is doing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import time
from typing import Any, Final

from scout_core.decision.snapshots import Phase
from scout_core.evidence.ring import CLOSED, EXITING, FAILED, RUNNING, RingReader
from scout_core.evidence.stack import frames_in_dump, is_compiling
from scout_core.observer import triage
from scout_core.observer.contact import Contact
from scout_core.observer.limits import Limits, phase_named

ANSWER_S: Final = 0.3
"""A healthy interpreter answers in milliseconds, a busy machine in tens of them."""
EXAMINATION_S: Final = 0.6
"""An examination ends after this time, answered or not."""
_READ_BYTES: Final = 1 << 16
_DUMP_CHARS: Final = 1 << 17
_REPLIES_KEPT: Final = 8


class Examination:
    """One attempt to find out what a trainer is doing; never waits, `advance` is called again."""

    def __init__(self, member: Member) -> None:
        contact = member.contact
        self.member = member
        self.stack: list[str] = []
        self.refreshed = False
        """Completions in the ring are those of now."""
        self.holds_gil = False
        self.dumped = False
        self.started_s = time.monotonic()
        self._before = triage.look(contact.pid, contact.training_thread)
        self._helper_before = triage.look(contact.pid, contact.helper_thread)
        self._after: triage.Thread | None = None
        self._number = member.ask()

    @property
    def answered(self) -> bool:
        """The interpreter answered, so nobody keeps the GIL from its helper."""
        return bool(self.stack) and not self.dumped

    @property
    def activity(self) -> triage.Activity:
        """What the training thread did meanwhile."""
        return triage.compare(self._before, self._after)

    def advance(self) -> bool:
        """Go on; returns True when there is nothing more to wait for."""
        waited_s = time.monotonic() - self.started_s
        reply = self.member.reply_to(self._number)
        self.stack = reply.get("stack", self.stack)
        self.refreshed = bool(reply.get("refreshed"))
        if waited_s >= ANSWER_S and not self.stack and not self.holds_gil:
            self._suspect_gil()
        over = waited_s >= EXAMINATION_S or self.member.ended
        if over or (self.answered and self.refreshed and waited_s >= ANSWER_S):
            contact = self.member.contact
            self._after = triage.look(contact.pid, contact.training_thread)
            if self.holds_gil and not self.stack:
                self.stack = frames_in_dump(self.member.dump, contact.training_ident)
                self.dumped = bool(self.stack)
            return True
        return False

    def _suspect_gil(self) -> None:
        """Have the stacks dumped without the GIL when it is certain that it is kept."""
        contact = self.member.contact
        helper = triage.look(contact.pid, contact.helper_thread)
        self.holds_gil = triage.holds_gil(self._helper_before, helper)
        if self.holds_gil and contact.dump_signal:
            _signal_thread(contact.pid, contact.helper_thread, contact.dump_signal)


class Member:
    """A trainer of this node."""

    def __init__(self, contact: Contact) -> None:
        """Open everything that reaches it.

        Raises:
            OSError: it is gone, or belongs to somebody else.
            ScoutError: its ring is of another version.
        """
        self.contact = contact
        self.rank = contact.rank
        self.pidfd = os.pidfd_open(contact.pid)
        folder = f"/proc/{contact.pid}/fd"
        self.ring = RingReader.open(f"{folder}/{contact.ring}")
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._requests = os.open(f"{folder}/{contact.requests}", os.O_WRONLY | flags)
        self._answers = os.open(f"{folder}/{contact.replies}", os.O_RDONLY | flags)
        self._counters = self.ring.counters()
        self.changed_s = time.monotonic()
        """When visible progress was last noticed."""
        self.ended_s: float | None = None
        """When the process ended: it was last seen alive then, or said so itself."""
        self._alive_s = time.monotonic()
        self.exit_code: int | None = None
        self.compiles = False
        """Its stack was last seen inside a compiler."""
        self.dump = ""
        """What `faulthandler` wrote last."""
        self._asked = 0
        self._replies_to: dict[int, dict[str, Any]] = {}
        self._unread = b""

    @property
    def ended(self) -> bool:
        """Its process has ended."""
        return self.ended_s is not None

    @property
    def finished(self) -> bool:
        """It has left on purpose: it said so, or its exit code does."""
        end = self.ring.end()
        if end == EXITING:
            return self.exit_code in (0, None)
        return end == CLOSED or (self.ended and self.exit_code == 0 and end == RUNNING)

    @property
    def died(self) -> bool:
        """It ended in another way than on purpose, or is about to."""
        return not self.finished and (self.ended or self.ring.end() == FAILED)

    @property
    def phase(self) -> Phase:
        """The phase it published last; compiling counts as initialisation."""
        if self.finished:
            return Phase.FINISHED
        phase = phase_named(self.ring.progress().phase)
        return Phase.INITIALIZE if self.compiles and phase is not Phase.IDLE else phase

    def observe(self, now_s: float) -> None:
        """Notice progress and the end of the process."""
        if self.ended:
            return
        counters = self.ring.counters()
        if counters != self._counters:
            self._counters = counters
            self.changed_s = now_s
            self.compiles = False
        if triage.has_ended(self.pidfd):
            self.exit_code = triage.exit_code(self.pidfd, self.contact.pid)
            self.ended_s = self._time_of_end()
            if self.contact.trace_socket:  # what it could not remove when it was killed
                shutil.rmtree(os.path.dirname(self.contact.trace_socket), ignore_errors=True)
        self._alive_s = now_s

    def _time_of_end(self) -> float:
        """When it said that it ends, or else was last seen alive.

        So whoever dies of this death and says so died later.
        """
        said_ns = self.ring.end_ns()
        return said_ns / 1e9 if said_ns else self._alive_s

    def silent_s(self, now_s: float) -> float:
        """Return the seconds since visible progress."""
        return now_s - self.changed_s

    def is_late(self, now_s: float, limits: Limits) -> bool:
        """Tell whether it has been silent for longer than its phase allows."""
        if self.ended or self.finished:
            return False
        return self.silent_s(now_s) > limits.of(self.phase)

    def note_stack(self, stack: list[str]) -> None:
        """Remember what the stack says about the phase."""
        self.compiles = is_compiling(stack)

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; False when the trainer cannot take it."""
        try:
            os.write(self._requests, json.dumps(message).encode() + b"\n")
        except OSError:  # its pipe is full because it does not read, or it is gone
            return False
        return True

    def ask(self) -> int:
        """Ask for the stack and for fresh completions; returns the number of the question."""
        self._asked += 1
        self.send({"ask": self._asked})
        return self._asked

    def reply_to(self, number: int) -> dict[str, Any]:
        """Return what has been answered to a question so far."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._answers, _READ_BYTES):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._take(line.decode("utf-8", "replace"))
        return self._replies_to.get(number, {})

    def _take(self, line: str) -> None:
        """Sort replies from stack dumps, which come through the same pipe."""
        if not line.startswith("{"):
            self.dump = f"{self.dump}{line}\n"[-_DUMP_CHARS:]
            return
        reply = json.loads(line)
        number = reply.pop("id")
        self._replies_to = {n: r for n, r in self._replies_to.items() if n > number - _REPLIES_KEPT}
        self._replies_to.setdefault(number, {}).update(reply)

    def close(self) -> None:
        """Give all descriptors back."""
        for descriptor in (self.pidfd, self._requests, self._answers):
            os.close(descriptor)


def _signal_thread(pid: int, tid: int, number: int) -> None:
    """Send a signal to one thread: no other thread of the process is interrupted."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc >= 2.30
    if tgkill is not None:
        tgkill(pid, tid, number)
