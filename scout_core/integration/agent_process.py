"""Starts the node's observer agent, starts it again when it dies, and lets it go at the end."""

from __future__ import annotations

import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from scout_core.errors import ScoutError
from scout_core.observer.plan import Plan, Start

MAX_RESTARTS: Final = 3
READY_TIMEOUT_S: Final = 20.0
_PACKAGE_PARENT: Final = str(pathlib.Path(__file__).resolve().parents[2])


class AgentProcess:
    """One agent, owned by the lowest rank of its node. Not a daemon: it ends with the job."""

    def __init__(self, start: Start, on_lost: Callable[[str], None]) -> None:
        """Start the agent and learn its keys and port.

        Args:
            on_lost: called once, when the agent has died and cannot be started again.

        Raises:
            ScoutError: it did not start in time; says where its output is.
        """
        self._start = start
        self._on_lost = on_lost
        self._plan: Plan | None = None
        self._restarts = 0
        self._log = pathlib.Path(start.run_dir) / f"observer-{start.index}.log"
        self._process, ready = self._launch()
        self.public_key: str = ready["public"]
        self.port: int = ready["port"]
        self._start = replace(
            start, public_key=self.public_key, secret_key=ready["secret"], port=self.port
        )

    @property
    def pid(self) -> int:
        """Process id of the agent that runs now."""
        return self._process.pid

    def go(self, plan: Plan) -> None:
        """Tell the agent about the other nodes; it begins to watch."""
        self._plan = plan
        self._tell(plan)

    def tick(self) -> None:
        """Notice that the agent has died, and start another one; called now and then."""
        if self._plan is None or self._process.poll() is None:
            return
        code = self._process.returncode
        if self._restarts == MAX_RESTARTS:
            self._plan = None
            self._on_lost(f"the observer agent died {self._restarts + 1} times, code {code} last")
            return
        self._restarts += 1
        try:
            self._process, _ = self._launch()
            self._tell(self._plan)
        except (ScoutError, OSError) as error:
            self._plan = None
            self._on_lost(f"the observer agent died with code {code} and cannot start: {error}")

    def close(self, timeout_s: float) -> None:
        """Wait a moment for the agent to end by itself, so that it is not left to init.

        It goes on for as long as other trainers of its node do.
        """
        self._plan = None
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            select.select([], [], [], 0.02)
        if self._process.poll() is None:  # collected when it ends, so that no zombie stays
            threading.Thread(target=self._process.wait, daemon=True).start()

    def _launch(self) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # -P: a module of the user's working directory must not replace one of ours.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "scout_core.observer.agent", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl-C is for the trainers
                env=_environment(),
            )
        finally:
            os.close(theirs)
            os.close(log)
        try:
            _write_line(process, self._start.to_json())
            return process, self._read_ready(ours)
        except ScoutError:
            process.kill()
            process.wait()
            raise
        finally:
            os.close(ours)

    def _read_ready(self, pipe: int) -> dict[str, Any]:
        deadline = time.monotonic() + READY_TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline - time.monotonic())
            part = os.read(pipe, 1 << 16) if select.select([pipe], [], [], left_s)[0] else b""
            if not part:
                raise ScoutError(
                    f"the observer agent did not start within {READY_TIMEOUT_S:.0f} s; "
                    f"its output is in {self._log}"
                )
            line += part
        ready = json.loads(line)
        assert isinstance(ready, dict)
        return ready

    def _tell(self, plan: Plan) -> None:
        _write_line(self._process, plan.to_json())
        assert self._process.stdin is not None
        self._process.stdin.close()


def _write_line(process: subprocess.Popen[bytes], value: dict[str, Any]) -> None:
    """Write one line to the agent.

    Raises:
        ScoutError: it does not read, or has died.
    """
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    os.set_blocking(pipe, False)
    rest = json.dumps(value).encode() + b"\n"
    deadline = time.monotonic() + READY_TIMEOUT_S
    while rest:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            if not select.select([], [pipe], [], left_s)[1]:
                raise ScoutError("the observer agent does not read its input")
            rest = rest[os.write(pipe, rest) :]
        except BrokenPipeError:
            raise ScoutError("the observer agent has died") from None


def _environment() -> dict[str, str]:
    """The trainer's, with this package in reach and without what is only for trainers."""
    environment = dict(os.environ)
    paths = [_PACKAGE_PARENT, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
