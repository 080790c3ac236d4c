"""Run a function on N ranks in one test: real processes, real gloo, and never a hang."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pathlib
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

# A fork server that has already imported torch starts a rank in ~0.1 s instead of several s.
_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch.distributed", "scout_core.testing"]
_context.set_forkserver_preload(_preloaded)


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish in time; the message names every such rank."""


class _Job(NamedTuple):
    world_size: int
    store: str  # path of the file that the ranks meet at: no ports, so tests can run in parallel
    stacks: str  # folder for the stacks of late ranks
    deadline: float  # by time.monotonic(), which the processes of a machine share
    timeout_s: float
    init_group: bool
    body: Callable[..., Any]
    args: tuple[Any, ...]


def preload(modules: Sequence[str]) -> None:
    """Import more modules once in the fork server; call it before the first `run_ranks`.

    A process has one fork server, so what all test modules ask for is imported together.
    """
    _preloaded.extend(name for name in modules if name not in _preloaded)
    _context.set_forkserver_preload(_preloaded)


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 30.0,
    init_group: bool = True,
    allow_dead: Sequence[int] = (),
) -> list[Any]:
    """Call `body(rank, *args)` on `world_size` gloo ranks and return the results in rank order.

    Args:
        body: a function of a module that can be imported; it and its result are pickled.
        timeout_s: limit for the whole call; stopping the ranks takes a moment more.
        init_group: create the default process group; otherwise only RANK, WORLD_SIZE and the
            like are set and the body creates it (MASTER_PORT is free at that moment).
        allow_dead: ranks that may die without a result; theirs is None.

    Raises:
        RankFailed: some rank raised, died or was late; late ranks are shown with their stacks.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
        store = str(pathlib.Path(folder) / "store")
        job = _Job(world_size, store, folder, deadline, timeout_s, init_group, body, args)
        pipes: list[Connection] = []
        ranks: list[ForkServerProcess] = []
        port = held.enter_context(reserved_port())
        try:
            for rank in range(world_size):
                ours, theirs = _context.Pipe(duplex=False)
                pipes.append(ours)
                process = _context.Process(target=_rank_main, args=(theirs, rank, job, port))
                process.start()
                theirs.close()
                ranks.append(process)
            return _collect(pipes, deadline, pathlib.Path(folder), frozenset(allow_dead))
        finally:
            for process in ranks:
                process.kill()  # only processes started above
                process.join()
            for pipe in pipes:
                pipe.close()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Hold a port that torch's store can listen on, and that the system gives to nobody else."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        holder.bind(("127.0.0.1", 0))  # and does not listen
        yield int(holder.getsockname()[1])


def _rank_main(pipe: Connection, rank: int, job: _Job, port: int) -> None:
    import torch
    import torch.distributed as dist

    stack = open(pathlib.Path(job.stacks) / f"stack-{rank}", "w")  # noqa: SIM115 -- for life
    left_s = job.deadline - time.monotonic()  # the parent reads the stack when none is left
    faulthandler.dump_traceback_later(max(0.01, 0.9 * left_s), file=stack)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        if job.init_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{job.store}",
                rank=rank,
                world_size=job.world_size,
                timeout=datetime.timedelta(seconds=job.timeout_s),
            )
            _meet(job)
        pipe.send((True, job.body(rank, *job.args)))
    except BaseException:  # noqa: BLE001 -- the parent reports it with the rank's number
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    time.sleep(job.timeout_s)  # the parent ends this process when all results are in


def _meet(job: _Job) -> None:
    """Wait until all ranks are connected: one that dies before that would fail the others."""
    import torch.distributed as dist

    store = dist.FileStore(f"{job.store}-met", job.world_size)  # type: ignore[attr-defined]
    store.add("met", 1)
    while store.add("met", 0) < job.world_size and time.monotonic() < job.deadline:
        time.sleep(0.002)


def _collect(
    pipes: list[Connection], deadline: float, folder: pathlib.Path, allow_dead: frozenset[int]
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = dict(zip(pipes, range(len(pipes)), strict=True))
    while pending and not failures:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = {rank: _stack_of(rank, folder) for rank in pending.values()}
            failures |= {rank: f"no result in time\n{stack}" for rank, stack in late.items()}
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = rank in allow_dead, "died without a word"
                value = None if ok else value
            (results if ok else failures)[rank] = value
    if failures:
        raise RankFailed("\n".join(f"rank {r}: {failures[r]}" for r in sorted(failures)))
    return [results[r] for r in range(len(pipes))]


def _stack_of(rank: int, folder: pathlib.Path) -> str:
    path = folder / f"stack-{rank}"
    return path.read_text() if path.exists() else ""
