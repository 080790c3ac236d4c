"""Run Megatron jobs from a test through a fork server, one per version of megatron-core."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from integration_tests.megatron_cases import Job, RankResult, read_result, result_path
from integration_tests.torchtitan_harness import ROOT, START_S, JobFailed, TitanServer, environment
from integration_tests.torchtitan_job import Outcome

CONFIGS = ROOT / "configs" / "megatron"
SITE = ROOT / "integration_tests" / "megatron_site"
UNPACKED = ROOT / ".cache" / "megatron" / "megatron-core-0.18.2"
"""What `make megatron-next` unpacks: a newer version than pip installs on Python 3.11."""


@dataclass(frozen=True)
class Finished:
    """A job that ended."""

    job: Job
    outcome: Outcome
    ranks: list[RankResult]


class MegatronServer(TitanServer):
    """The fork server with Megatron preloaded; a context manager."""

    def __init__(self, tree: pathlib.Path | None = None) -> None:
        """Use the installed megatron-core, or the one unpacked in `tree`."""
        self._tree = tree

    def __enter__(self) -> Self:
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "integration_tests.megatron_server"]
        if self._tree is not None:
            more["PYTHONPATH"] = python_path(SITE, self._tree)
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._answer(START_S) == "ready"
        return self

    def run(self, job: Job) -> Finished:  # type: ignore[override]
        """Run a job that is expected to succeed.

        Raises:
            JobFailed: a rank failed, or the job took too long.
        """
        outcome = self.attempt(job)  # type: ignore[arg-type]
        bad = [rank for rank, code in enumerate(outcome.codes) if code != 0]
        return _finished(job, outcome, bad)

    def run_until_hang(self, job: Job) -> Finished:
        """Run a job that is ended once an incident is reported; its ranks left results before."""
        stop_when = f"{job.folder}/scout/incidents.jsonl"
        outcome = self.attempt(replace(job, stop_when=stop_when))  # type: ignore[arg-type]
        bad = [r for r in range(job.ranks) if not result_path(job.folder, r).exists()]
        return _finished(job, outcome, bad)


def _finished(job: Job, outcome: Outcome, bad: Sequence[int]) -> Finished:
    if outcome.late or bad:
        logs = "\n".join(f"rank {rank}: {log_of(job.folder, rank)[-3000:]}" for rank in bad)
        late = f"late after {outcome.seconds:.0f} s; " if outcome.late else ""
        raise JobFailed(f"{late}exit codes {outcome.codes}\n{logs}")
    return Finished(job, outcome, [read_result(job.folder, r) for r in range(job.ranks)])


CPU = (
    *("--distributed-backend", "gloo", "--use-cpu-initialization", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    "--no-create-attention-mask-in-dataloader",
)
"""What megatron.training needs on a CPU."""


def arguments_of(script: str) -> tuple[str, ...]:
    """Return what a script in configs/megatron gives to pretrain_small.py, without SCOUT's part."""
    with tempfile.TemporaryDirectory() as folder:
        stand_in = pathlib.Path(folder) / "torchrun"
        stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        stand_in.chmod(0o700)
        environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        command = [str(CONFIGS / script)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    given = done.stdout.split()
    given = given[given.index("pretrain_small.py") + 1 :]
    first, last = given.index("--scout"), given.index("--scout-interval-steps") + 1
    return *given[:first], *given[last + 1 :]


def cpu_environment(**more: str) -> dict[str, str]:
    """Variables for the newer Megatron on a CPU, in this process's children and theirs."""
    threads = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
    bin_first = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    path = {"PATH": bin_first, "PYTHONPATH": python_path(SITE, UNPACKED)}
    return environment(**threads, **path, PYTHONWARNINGS="ignore", **more)


def python_path(*first: pathlib.Path) -> str:
    """Put folders before those of $PYTHONPATH."""
    after = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, first), *([after] if after else [])])


def log_of(folder: str, rank: int) -> str:
    """What a rank printed."""
    path = pathlib.Path(folder) / f"rank-{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""
