"""Real gloo jobs that stop, and what SCOUT's observer writes about them. Used by test_hangs.py."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from scout_core.config import HangConfig
from scout_core.decision.incident import Incident
from scout_core.decision.topology import Topology
from scout_core.integration.hang_watch import HangWatch
from scout_core.report.events import RunDir
from scout_core.testing import preload

STALL_S: Final = 1.5
DEADLINE_S: Final = 20.0
"""A verdict comes after about 2 s; more only on a busy machine."""
AGENT_GONE_S: Final = 10.0
LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

_context = multiprocessing.get_context("forkserver")
preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "scout_core.integration.hang_watch",
    ]
)


@dataclass
class Trainer:
    """One rank of a job, as its recipe sees it."""

    rank: int
    size: int
    fault: int
    """Global rank that does what the recipe is about."""
    watch: HangWatch
    x: torch.Tensor = field(default_factory=lambda: torch.ones(4))

    @property
    def faulty(self) -> bool:
        """This rank is the one."""
        return self.rank == self.fault

    def steps(self, count: int) -> Iterator[int]:
        """Steps 1..count; each is published when the next one begins."""
        for step in range(1, count + 1):
            yield step
            self.watch.step(step)

    def warm_up(self, steps: int = 2) -> None:
        """Healthy steps, so that the job is past its initialisation."""
        for _ in self.steps(steps):
            dist.all_reduce(self.x)


def elsewhere() -> None:
    """Work on the host for ever: the job's deadline ends it."""
    while True:
        time.sleep(3600)


Recipe = Callable[[Trainer], None]


class Job:
    """A running job: its processes and its run folder."""

    def __init__(
        self,
        recipe: Recipe,
        size: int,
        fault: int,
        *,
        config: HangConfig | None = None,
        hosts: Sequence[str] = (),
        other_tool: bool = False,
    ) -> None:
        """Prepare a job.

        Args:
            fault: global rank that the recipe is about.
            hosts: names of machines to pretend, one per rank.
            other_tool: another tool already observes collectives, so that SCOUT cannot.
        """
        self.config = config or HangConfig(stall_timeout_s=STALL_S)
        self._folder = tempfile.TemporaryDirectory(prefix="hang-", ignore_cleanup_errors=True)
        folder = pathlib.Path(self._folder.name)
        self.run_dir = RunDir(folder / "run")
        self.output = folder / "output"
        self.output.touch()
        self.events_at_the_end: list[dict[str, Any]] = []
        arguments = (recipe, size, fault, str(folder), self.config, tuple(hosts), other_tool)
        self.ranks = [
            _context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(size)
        ]

    def __enter__(self) -> Job:
        for rank in self.ranks:
            rank.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.events_at_the_end = self.run_dir.events()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the processes of this job, also those that are stopped."""
        for rank in self.ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()

    def agents(self) -> list[int]:
        """Process ids of the agents that carry a hub."""
        files = sorted(self.run_dir.path.glob("observer-*.json"))
        return [json.loads(file.read_text())["pid"] for file in files if file.stat().st_size]

    def incident(self, timeout_s: float = DEADLINE_S) -> Incident:
        """Wait for the first incident."""
        return self.wait(lambda: (self.run_dir.incidents() or [None])[0], timeout_s)

    def event(self, name: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for an event."""
        return self.wait(
            lambda: next((e for e in self.run_dir.events() if e["event"] == name), None), timeout_s
        )

    def wait(self, look: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
        """Wait until `look` returns something; fail with what is known otherwise."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = look()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(
            f"nothing within {timeout_s} s; events {self.run_dir.events()}; "
            f"exit codes {[r.exitcode for r in self.ranks]}; output {self.output.read_text()}"
        )

    def join(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until all ranks have ended by themselves."""
        self.wait(lambda: not any(rank.is_alive() for rank in self.ranks), timeout_s)


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def take_the_place_of_the_observer() -> None:
    """Install a kernel that hands barriers on, as another tool would."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    hand_on = torch.ops.c10d.barrier.default._handle.redispatch_boxed
    library = torch.library.Library("c10d", "IMPL")
    library.impl(
        "barrier",
        lambda keys, *args: hand_on(keys & after, *args),
        "BackendSelect",
        with_keyset=True,
    )
    _kept.append(library)


_kept: list[Any] = []


def _rank_main(
    rank: int,
    recipe: Recipe,
    size: int,
    fault: int,
    folder: str,
    config: HangConfig,
    hosts: tuple[str, ...],
    other_tool: bool,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(LOOPBACK)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    if other_tool:
        take_the_place_of_the_observer()
    topology = Topology.from_degrees(d=size, hosts=hosts or None)
    watch = HangWatch.start(
        rank=rank,
        world_size=size,
        run_dir=RunDir(f"{folder}/run"),
        config=config,
        store=dist.distributed_c10d._get_default_store(),
        topology=topology,
    )
    assert not watch.lost, watch.lost
    with watch:
        recipe(Trainer(rank, size, fault, watch))
