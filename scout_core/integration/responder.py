"""The helper thread of a trainer: answers its node's agent and prints verdicts, nothing else.

It waits in `poll` without the GIL, so it costs nothing while nobody asks, except that it looks for
completed operations a few times a second. It owns the only thread that SCOUT ever signals.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

from scout_core.evidence import collectives
from scout_core.evidence.stack import frames_of_thread

REFRESH_S: Final = 0.2
"""How old the completions in the ring may be."""
STDERR: Final = 2
_READ_BYTES: Final = 1 << 16
_CLOSE: Final = b"{}\n"
_JOIN_S: Final = 2.0


class Responder:
    """Reads requests from one anonymous pipe and answers through another."""

    def __init__(
        self,
        training_ident: int,
        on_tick: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Start the thread.

        Args:
            training_ident: Python ident of the thread whose stack is asked for.
            on_tick: called on the helper thread a few times a second.
            on_failure: called on the helper thread, which ends, with an internal error.
        """
        self._on_failure = on_failure
        self._training_ident = training_ident
        self._on_tick = on_tick
        self._closing = False
        self._unread = b""
        self.requests, self._requests_in = os.pipe2(os.O_CLOEXEC)
        self._replies_out, self.replies = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.dump_signal = _free_signal()
        if self.dump_signal:
            faulthandler.register(self.dump_signal, file=self.replies, all_threads=True)
        started = threading.Event()
        self.thread_id = 0
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="scout-responder", daemon=True
        )
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """End the thread, then give the signal and the pipes back, in this order.

        While the thread lives it takes the signal; when it is gone, the signal finds nobody.
        """
        self._closing = True
        os.write(self._requests_in, _CLOSE)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            return  # it is stuck in a print; the process ends without it
        if self.dump_signal:
            faulthandler.unregister(self.dump_signal)
        for descriptor in (self.requests, self._requests_in, self._replies_out, self.replies):
            os.close(descriptor)

    def _run(self, started: threading.Event) -> None:
        self.thread_id = threading.get_native_id()
        started.set()
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 -- the guard of this thread
            self._on_failure(error)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self.requests, select.POLLIN)
        while not self._closing:
            if poller.poll(1000 * REFRESH_S):
                self._unread += os.read(self.requests, _READ_BYTES)
                *lines, self._unread = self._unread.split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
            else:
                collectives.refresh()
            self._on_tick()

    def _answer(self, request: dict[str, Any]) -> None:
        if "say" in request:
            _print(request["say"])
        if "ask" in request:
            number = request["ask"]
            self._reply({"id": number, "stack": frames_of_thread(self._training_ident)})
            collectives.refresh(thorough=True)
            self._reply({"id": number, "refreshed": True})

    def _reply(self, reply: dict[str, Any]) -> None:
        try:
            os.write(self.replies, json.dumps(reply).encode() + b"\n")
        except BlockingIOError:
            return  # nobody reads: the agent is gone


def _print(text: str) -> None:
    """Write to the console, not through `sys.stderr`: its lock may be held by a stuck thread."""
    try:
        os.write(STDERR, text.encode("utf-8", "replace") + b"\n")
    except OSError:
        return  # no console; the incident is in the run's folder


def _free_signal() -> int:
    """Return a real-time signal that nobody handles; 0 when there is none."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        lines = dict(line.partition(":")[::2] for line in file)
    taken = int(lines["SigCgt"].strip(), 16) | int(lines["SigIgn"].strip(), 16)
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not taken >> (number - 1) & 1:
            return number
    return 0
