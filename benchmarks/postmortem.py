"""How long the verdict takes on evidence that is there: in memory, and from folders of dumps."""

from __future__ import annotations

import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

from scout_core.decision.hang import diagnose
from scout_core.lab.hang_dumps import nccl_dumps, pickled
from scout_core.lab.hang_model import Job, Side, random_faults, run_until_stopped

JOBS = (
    Job(tensor=2, data=2, stages=2),
    Job(tensor=8, data=16, stages=8, micro_batches=2),
    Job(tensor=2, data=1024, stages=8, micro_batches=1, layers=1, steps=1),
)
FOLDERS = (Job(tensor=4, data=2, stages=2), Job(tensor=8, data=16, stages=8, micro_batches=2))
REPEATS = 5
FOUND_FAULT = 3
ENTRY = "from scout_core.cli.main import main; main()"


def main() -> None:
    """Print both tables."""
    console = Console()
    table = Table("ranks", "groups", "fault", "verdict, CPU time", "aim", title="hang.diagnose")
    for job in JOBS:
        for side in Side:
            table.add_row(*_verdict(job, side))
    console.print(table)
    table = Table("dumps", "whole command", "aim", title="scout postmortem FOLDER")
    for job in FOLDERS:
        table.add_row(*_command(job))
    console.print(table)


def _verdict(job: Job, side: Side) -> tuple[str, str, str, str, str]:
    faults = random_faults(job, random.Random(1), 1, side)
    snapshots = run_until_stopped(job, faults, run_ahead=12).snapshots()
    took_s = []
    for _ in range(REPEATS):
        begin = time.process_time()
        diagnosis = diagnose(snapshots)
        took_s.append(time.process_time() - begin)
    assert diagnosis.culprits == (faults[0].rank,)
    aim = "< 2 s" if job.world_size > 10_000 else ""
    median = f"{statistics.median(took_s) * 1e3:.1f} ms"
    return f"{job.world_size:,}", f"{len(job.groups):,}", side.value, median, aim


def _command(job: Job) -> tuple[str, str, str]:
    faults = random_faults(job, random.Random(2), 1, Side.CPU)
    stopped = run_until_stopped(job, faults, run_ahead=12)
    with tempfile.TemporaryDirectory() as folder:
        for rank, data in pickled(nccl_dumps(stopped, random.Random(2))).items():
            (pathlib.Path(folder) / f"dump_{rank}").write_bytes(data)
        took_s = [_run(folder) for _ in range(REPEATS)]
    aim = "< 1 s" if job.world_size == 16 else "< 10 s"
    return f"{job.world_size:,}", f"{statistics.median(took_s):.2f} s", aim


def _run(folder: str) -> float:
    command = [sys.executable, "-c", ENTRY, "postmortem", folder, "--json"]
    begin = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == FOUND_FAULT, ended.stderr
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
