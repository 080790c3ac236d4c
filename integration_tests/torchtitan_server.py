"""Import torch and torchtitan once, then fork the ranks of each job: 2-5 s a job instead of 15.

Started by `torchtitan_harness.TitanServer` as a process of its own, because other frameworks must
not see torchtitan's CPU shim. Reads pickled `Job`s from stdin, writes pickled `Outcome`s to stdout.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import BinaryIO

from integration_tests import torchtitan_shim
from integration_tests.torchtitan_job import Job, Outcome
from scout_core.testing import reserved_port

PRELOADED = (
    "torchtitan.models.deepseek_v3",
    "torchtitan.models.llama3",
    "scout_core.integration.enable",  # but not scout_torchtitan: the flag is to import it
)
POLL_S = 0.02
GRACE_S = 1.0  # after one rank failed: the others usually fail with a message of their own

Body = Callable[[Job, int], None]


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one job after the other until stdin is closed."""
    torchtitan_shim.install()
    for module in PRELOADED:
        importlib.import_module(module)
    from integration_tests.torchtitan_rank import train

    _send(answers, "ready")
    while True:
        try:
            job = pickle.load(requests)
        except EOFError:
            return
        _send(answers, run_job(job, train))


def run_job(job: Job, body: Body) -> Outcome:
    """Fork the ranks and wait for them, for the job's stop condition, or for its deadline."""
    folder = pathlib.Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with reserved_port() as port:
        ranks = [_fork(job, rank, port, folder, body) for rank in range(job.ranks)]
        codes = _wait_for(ranks, job, started + job.timeout_s)
    spent = time.monotonic() - started
    return Outcome([codes[pid] for pid in ranks], spent, spent > job.timeout_s)


def _wait_for(ranks: list[int], job: Job, end: float) -> dict[int, int]:
    """Return the exit code of each process; those that are left at the end are killed."""
    codes: dict[int, int] = {}
    while len(codes) < job.ranks:
        codes |= _ended(set(ranks) - set(codes))
        now = time.monotonic()
        if any(codes.values()):
            end = min(end, now + GRACE_S)
        if now > end or _is_filled(job.stop_when):
            for pid in set(ranks) - set(codes):
                os.kill(pid, signal.SIGKILL)  # only ranks that were forked above
        time.sleep(POLL_S)
    return codes


def _ended(pids: set[int]) -> dict[int, int]:
    codes = {}
    for pid in pids:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def _is_filled(path: str) -> bool:
    return bool(path) and os.path.exists(path) and os.path.getsize(path) > 0


def _fork(job: Job, rank: int, port: int, folder: pathlib.Path, body: Body) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job.ranks),
            LOCAL_WORLD_SIZE=str(job.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        body(job, rank)
        code = 0
    except BaseException:  # noqa: BLE001 -- the parent sees the code, the log has the trace
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _send(answers: BinaryIO, value: object) -> None:
    pickle.dump(value, answers)
    answers.flush()


if __name__ == "__main__":
    to_parent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not mix with the answers
    serve(sys.stdin.buffer, to_parent)
