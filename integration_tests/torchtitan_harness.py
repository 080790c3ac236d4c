"""Run torchtitan jobs from a test: through the fork server, or through the stock torchrun entry."""

from __future__ import annotations

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from integration_tests.torchtitan_job import (
    Break,
    Job,
    Outcome,
    RankResult,
    read_result,
    stock_fault,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
START_S = 120.0
STOCK_S = 240.0
MARGIN_S = 15.0  # of the server beyond a job's own deadline


class JobFailed(AssertionError):
    """A rank failed or was late; the message holds the end of every such rank's log."""


@dataclass(frozen=True)
class Finished:
    """A job that ended."""

    job: Job
    outcome: Outcome
    ranks: list[RankResult]

    def losses(self, first: int, end: int) -> list[list[tuple[int, str, str]]]:
        """Step, loss and gradient norm of the steps from `first` to `end` (excluded), by rank."""
        return [[loss for loss in rank.losses if first <= loss[0] < end] for rank in self.ranks]

    def log(self, rank: int) -> str:
        """What a rank printed."""
        return _log(self.job.folder, rank)


class TitanServer:
    """The fork server with torchtitan preloaded; a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.torchtitan_server"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._answer(START_S) == "ready"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, job: Job) -> Finished:
        """Run a job that is expected to succeed.

        Raises:
            JobFailed: a rank failed, or the job took too long.
        """
        outcome = self.attempt(job)
        bad = [rank for rank, code in enumerate(outcome.codes) if code != 0]
        if outcome.late or bad:
            logs = "\n".join(f"rank {rank}: {_log(job.folder, rank)[-3000:]}" for rank in bad)
            late = f"late after {outcome.seconds:.0f} s; " if outcome.late else ""
            raise JobFailed(f"{late}exit codes {outcome.codes}\n{logs}")
        results = [read_result(job.folder, rank) for rank in range(job.ranks)]
        return Finished(job, outcome, [result for result in results if result is not None])

    def attempt(self, job: Job) -> Outcome:
        """Run a job and say how it ended."""
        assert self._process.stdin is not None
        pickle.dump(job, self._process.stdin)
        self._process.stdin.flush()
        outcome = self._answer(job.timeout_s + MARGIN_S)
        assert isinstance(outcome, Outcome)
        return outcome

    def _answer(self, timeout_s: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        killer = threading.Timer(timeout_s, self._process.kill)
        killer.start()
        try:
            return pickle.load(stdout)
        except EOFError:
            raise JobFailed(f"the fork server ended or gave no answer in {timeout_s} s") from None
        finally:
            killer.cancel()


def run_stock(ranks: int, argv: Sequence[str], folder: pathlib.Path, broken: Break) -> str:
    """Run `torchrun -m torchtitan.train` as a user does, and return what it printed.

    The CPU shim comes in through Python's own start-up, the fault through torchtitan's own
    `experimental.custom_import`.
    """
    (folder / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    from integration_tests import torchtitan_shim\n"
        "    torchtitan_shim.install()\n"
    )
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = environment(PYTHONPATH=os.pathsep.join(paths), **stock_fault(broken))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", "torchtitan.train", *argv]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=STOCK_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and the ranks it started
        printed, _ = process.communicate()
    return printed.decode(errors="replace")


def environment(**more: str) -> dict[str, str]:
    """Variables of every job: no network, one thread per rank, loopback."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def _log(folder: str, rank: int) -> str:
    path = pathlib.Path(folder) / f"rank-{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""
