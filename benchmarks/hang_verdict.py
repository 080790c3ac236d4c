"""How long it takes until a stopped rank is named: real jobs, and synthetic ones of any size."""

from __future__ import annotations

import json
import pathlib
import random
import statistics
import time

from rich.console import Console
from rich.table import Table

from integration_tests.hang_jobs import STALL_S, Job, Trainer, elsewhere
from scout_core.decision.evidence import Progress
from scout_core.decision.hang import HangKind, diagnose
from scout_core.decision.snapshots import GroupState, Operation, ProcessState, RankSnapshot
from scout_core.observer.wire import pack, unpack

RANKS = 8
JOBS = 5
SYNTHETIC_RANKS = (1_024, 16_384)
GROUP = 8


def main() -> None:
    """Print both tables."""
    real = Table("what", "measured", "aim", title=f"{RANKS} gloo ranks, limit {STALL_S} s")
    beyond = [
        _seconds_beyond_the_limit(rank) for rank in random.Random(0).sample(range(RANKS), JOBS)
    ]
    real.add_row("named after the limit, median", f"{statistics.median(beyond):.2f} s", "<= 2 s")
    real.add_row(f"named after the limit, worst of {JOBS}", f"{max(beyond):.2f} s", "<= 2 s")
    Console().print(real)
    table = Table("ranks", "bytes to the hub", "decode", "verdict", title="Hub, synthetic job")
    for size in SYNTHETIC_RANKS:
        table.add_row(*_synthetic(size))
    Console().print(table)


def stops(trainer: Trainer) -> None:
    """Train; in step 20 the faulty rank notes the time and goes elsewhere."""
    trainer.warm_up(20)
    if trainer.faulty:
        note = pathlib.Path(trainer.watch.run_dir) / "stopped"
        note.write_text(str(time.monotonic()))
        elsewhere()
    trainer.warm_up(1)


def _seconds_beyond_the_limit(rank: int) -> float:
    with Job(stops, RANKS, rank) as job:
        incident = job.incident()
        named_s = time.monotonic()
        assert incident.culprit_ranks == (rank,)
        stopped_s = float((job.run_dir.path / "stopped").read_text())
    return named_s - stopped_s - STALL_S


def _synthetic(size: int) -> tuple[str, str, str, str]:
    culprit = random.Random(size).randrange(size)
    wire = json.dumps([pack(_waiting(rank, size, culprit)) for rank in range(size)])
    begin = time.perf_counter()
    snapshots = [unpack(message) for message in json.loads(wire)]
    decoded = time.perf_counter()
    diagnosis = diagnose(snapshots)
    judged = time.perf_counter()
    assert (diagnosis.kind, diagnosis.culprits) == (HangKind.NEVER_ARRIVED, (culprit,))
    times = f"{decoded - begin:.2f} s", f"{judged - decoded:.2f} s"
    return f"{size:,}", f"{len(wire) / 1e6:.1f} MB", *times


def _waiting(rank: int, size: int, culprit: int) -> RankSnapshot:
    """Rows and columns of a grid and the world; everybody waits in the world but one."""
    row = tuple(range(rank // GROUP * GROUP, rank // GROUP * GROUP + GROUP))
    column = tuple(range(rank % GROUP, size, GROUP))
    entered = 3 if rank == culprit else 4
    operations = tuple(
        Operation(number, "all_reduce", "float32 sum numel 4096", call_site="train.py:10 step")
        for number in range(1, entered + 1)
    )
    world = GroupState("world", tuple(range(size)), entered, 3, operations=operations)
    done = tuple(operations[:3])
    return RankSnapshot(
        rank,
        host=f"host-{rank // GROUP}",
        state=ProcessState.ALIVE,
        progress=Progress(100, 7),
        phase_age_s=31.0,
        source="observer",
        complete=("scout",),
        groups=(
            world,
            GroupState(f"row-{row[0]}", row, 3, 3, operations=done),
            GroupState(f"column-{column[0]}", column, 3, 3, operations=done),
        ),
    )


if __name__ == "__main__":
    main()
