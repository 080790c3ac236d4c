"""Compute stragglers in real jobs: checks until the right rank is named, and false alarms.

Gloo processes on this machine train the drill's model with a check after every step. Stragglers of
+10, 20 and 50 % on random ranks alternate with healthy stretches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from scout_core.decision.incident import Incident, Kind
from scout_core.integration.workload import workers_of
from scout_core.lab.drill import Batches, DrillPlan, start, train_step
from scout_core.lab.faults import FaultAt
from scout_core.lab.injection import inject
from scout_core.lab.parallel import Parallelism
from scout_core.testing import run_ranks

RANKS = (3, 4, 8)
PERCENTS = (10.0, 20.0, 50.0)
WITHIN = 3  # checks in which a straggler is to be named
MOST_CHECKS = 12
HEALTHY_CHECKS = 24  # before each straggler


@dataclass
class Row:
    """What happened on N ranks."""

    ranks: int
    latency: dict[str, list[int | None]] = field(default_factory=dict)
    """Checks until a straggler of that many percent was named; None: not within `MOST_CHECKS`."""
    wrong: list[str] = field(default_factory=list)
    """Messages that name a rank which is not slow."""
    clean_checks: int = 0
    slowdowns: int = 0
    """Times that all ranks together were reported to have become slower; names nobody."""


class _Job:
    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        self.plan = DrillPlan(Parallelism.DDP, ranks, (), 0, interval_steps=1)
        self.model, self.optimizer, self.session, self.target = start(rank, self.plan, folder)
        self.batches = Batches(self.plan, workers_of(self.session.topology)[rank].replica)
        self.step = 0

    def check(self) -> list[Incident]:
        """Train one step, with its check; return new incidents that are about time."""
        before = len(self.session.incidents())
        train_step(self.model, self.optimizer, self.batches.of(self.step))
        self.step += 1
        return self.session.incidents()[before:]


def _measure(rank: int, ranks: int, repeats: int, folder: str) -> Row:
    job, row = _Job(rank, ranks, folder), Row(ranks)
    draw = random.Random(ranks)
    for percent in PERCENTS * repeats:
        slow = draw.randrange(ranks)
        for _ in range(HEALTHY_CHECKS):
            _note(job.check(), row, slow=None)
            row.clean_checks += 1
        fault = FaultAt("straggler", slow, job.step, percent=percent)
        undo = inject(fault, job.target) if rank == slow else lambda: None
        latency = None
        for checks in range(1, MOST_CHECKS + 1):
            if _note(job.check(), row, slow):
                latency = checks
                break
        undo()
        row.latency.setdefault(f"{percent:g}", []).append(latency)
        for _ in range(MOST_CHECKS):  # its past must leave the window
            _note(job.check(), row, slow)
    job.session.close()
    dist.barrier()
    return row


def _note(found: list[Incident], row: Row, slow: int | None) -> bool:
    """Tell whether the slow rank is named, and enter what should not have been said."""
    for incident in found:
        row.slowdowns += incident.kind is Kind.GROUP_SLOWDOWN
        if incident.culprits and set(incident.culprit_ranks) != {slow}:
            row.wrong.append(incident.message)
    return any(incident.culprit_ranks == (slow,) for incident in found)


def run(repeats: int) -> list[Row]:
    """Measure each number of ranks in processes of its own."""
    rows = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_ranks(ranks, _measure, ranks, repeats, folder, timeout_s=1200)[0])
    return rows


def to_lines(rows: list[Row]) -> list[str]:
    """One line per number of ranks."""
    lines = []
    for row in rows:
        parts = [f"N={row.ranks}:"]
        for percent, latency in row.latency.items():
            named = [each for each in latency if each is not None]
            quick = sum(each <= WITHIN for each in named)
            middle = f"{statistics.median(named):g}" if named else "-"
            parts.append(
                f"+{percent} % named {len(named)}/{len(latency)}, {quick} within {WITHIN} checks "
                f"(median {middle});"
            )
        parts.append(f"{len(row.wrong)} wrong names in {row.clean_checks} clean checks,")
        parts.append(f"{row.slowdowns} group slow-downs")
        lines.append(" ".join(parts))
    return lines


def main() -> None:
    """Print the figures, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="each straggler once")
    arguments = parser.parse_args(sys.argv[1:])
    rows = run(1 if arguments.quick else 3)
    if arguments.json:
        plain: list[dict[str, Any]] = [asdict(row) for row in rows]
        print(json.dumps({"straggler_live": plain}))
        return
    print("Live stragglers: " + "\n  ".join(["", *to_lines(rows)]))


if __name__ == "__main__":
    main()
