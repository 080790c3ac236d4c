"""Sessions as users have them: several in a process, closed early, alone, in a bare script."""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scout_core import enable_resiliency
from scout_core.lab.campaign import TINY
from scout_core.lab.faults import FaultAt
from scout_core.lab.injection import Target, inject
from scout_core.lab.model import GPT, Text, loss_of
from scout_core.testing import run_ranks

pytestmark = pytest.mark.timeout(120)
CONFIG: dict[str, Any] = {
    "interval_steps": 1,
    "on_error": "raise",
    "communication": {"probe_interval_steps": 3},
    "workload": {"interval_steps": 4},
}


class Job:
    """A model of its own with its session."""

    def __init__(self, run_dir: str) -> None:
        torch.manual_seed(0)
        self.inner = GPT(TINY)
        self.model = DistributedDataParallel(self.inner)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session = enable_resiliency(self.model, self.optimizer, CONFIG, run_dir=run_dir)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, *batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def two_jobs(rank: int, folder: str, faulty: int) -> tuple[int, list[tuple[int, ...]], int]:
    """Train two models in turns; a rank corrupts the second. Checks and names of both."""
    first, second = Job(f"{folder}/first"), Job(f"{folder}/second")
    if rank == faulty:
        fault = FaultAt("sdc", rank, 0, layer=1)
        inject(fault, Target(list(second.inner.layers), second.optimizer))
    text = Text(TINY.context)
    for step in range(8):
        for job in (first, second):
            job.step(text.batch(0, rank, step, 2))
    named = [i.culprit_ranks for i in second.session.incidents()]
    found = len(first.session.incidents())
    for job in (first, second):
        job.session.close()
    return found, named, first.session.check_count


def test_two_models_of_one_process_have_sessions_that_know_nothing_of_each_other(
    tmp_path: pathlib.Path,
) -> None:
    faulty = random.randrange(3)
    for found, named, checks in run_ranks(3, two_jobs, str(tmp_path), faulty, timeout_s=100):
        assert (found, checks) == (0, 8)
        assert named
        assert set(named) == {(faulty,)}


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    )


def closed_early(rank: int, folder: str) -> tuple[bool, bool, float]:
    torch.manual_seed(0)
    bare = DistributedDataParallel(GPT(TINY))
    before = hooks_of(bare)
    job = Job(folder)
    text = Text(TINY.context)
    for step in range(3):  # in the middle of a work window, with a check armed
        job.step(text.batch(0, rank, step, 2))
    job.session.close()
    clean = hooks_of(job.model) == before and not job.optimizer._optimizer_step_post_hooks
    job.step(text.batch(0, rank, 9, 2))
    total = torch.ones(1)
    dist.all_reduce(total)
    again = enable_resiliency(job.model, job.optimizer, CONFIG, run_dir=f"{folder}/again")
    job.step(text.batch(0, rank, 10, 2))
    done = again.check_count == 1
    again.close()
    return clean, done, float(total)


def test_a_closed_session_leaves_nothing_and_another_can_begin(tmp_path: pathlib.Path) -> None:
    assert run_ranks(3, closed_early, str(tmp_path), timeout_s=100) == [(True, True, 3.0)] * 3


def alone(rank: int, folder: str) -> tuple[str, int]:
    job = Job(folder)
    for step in range(6):
        job.step(Text(TINY.context).batch(0, rank, step, 2))
    line, found = job.session.coverage().line(), len(job.session.incidents())
    job.session.close()
    return line, found


def test_a_job_of_one_rank_is_told_that_nothing_is_seen(tmp_path: pathlib.Path) -> None:
    ((line, found),) = run_ranks(1, alone, str(tmp_path), timeout_s=60)
    assert "can none" in line
    assert found == 0


SCRIPT = """
import sys, torch, torch.distributed as dist
from scout_core import enable_resiliency
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = enable_resiliency(model, optimizer, {"interval_steps": 1}, run_dir=sys.argv[1] + "/run")
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
print("steps", session.step_count)
"""


def test_a_script_without_a_guard_and_without_a_close_ends_by_itself(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["steps 3"]
    assert done.stderr.count("scout: pytorch") == 1
    assert "3 steps, 0 incident(s)" in done.stderr
