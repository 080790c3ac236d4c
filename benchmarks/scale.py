"""Localisation among 16,384 ranks: one slow NIC and one slow GPU at once.

    python -m benchmarks.scale [--json] [--runs 100]

dp 64 x fsdp 4 x pp 8 x tp 8 on hosts of 8 ranks: 8,448 process groups and 256 peer groups. Each
run draws the two ranks, times all replays and all groups with 2 % noise, first without the faults,
then with them, and lets the product's rules find them. About four minutes on an idle core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scout_core.decision.communication import CommunicationRule, GroupTiming
from scout_core.decision.consensus import Status
from scout_core.decision.noise import COLD_CHECKS, WINDOW
from scout_core.decision.straggler import StragglerRule
from scout_core.decision.topology import Topology

DEGREES = {"d": 64, "s": 4, "p": 8, "t": 8}
SECONDS = {"d": 0.040, "s": 0.012, "p": 0.003, "t": 0.002}
ACROSS = "dsp"  # kinds that a slow NIC slows; tensor parallelism is inside the host
REPLAY_S = 0.020
NOISE = 0.02
SLOW_NIC, SLOW_GPU = 1.3, 1.25
CLEAN_CHECKS = COLD_CHECKS + 2  # before the faults begin
SLOW_CHECKS = WINDOW + 1  # three to confirm, one to see that nothing else turns up


@dataclass(frozen=True)
class Run:
    """One seeded run."""

    right: bool
    false: int
    """Findings that are neither of the two faults."""
    decide_s: float
    """CPU time from the timings of one check to its verdicts, the slowest of the run."""


class Job:
    """The groups of the job, in arrays."""

    def __init__(self) -> None:
        self.topology = Topology.from_degrees(**DEGREES, order="dspt", hosts=8)
        self.groups = [(r, kind) for kind in DEGREES for r in self.topology.axis_groups(kind)]
        self.peers = [group.ranks for group in self.topology.peer_groups()]

    def groups_of(self, rank: int, kinds: str) -> set[tuple[int, ...]]:
        """Groups with this rank as a member."""
        return {ranks for ranks, kind in self.groups if kind in kinds and rank in ranks}

    def timings(
        self, slow: Mapping[tuple[int, ...], float], noise: np.random.Generator
    ) -> list[GroupTiming]:
        """One check of all groups."""
        factors = np.exp(noise.normal(0, NOISE, len(self.groups))).tolist()
        return [
            GroupTiming(
                ranks, kind, dict.fromkeys(ranks, SECONDS[kind] * slow.get(ranks, 1.0) * factor)
            )
            for (ranks, kind), factor in zip(self.groups, factors, strict=True)
        ]


def run(job: Job, seed: int) -> Run:
    """Let the rules find two random faults at once."""
    noise = np.random.default_rng(seed)
    nic, gpu = (int(rank) for rank in noise.choice(job.topology.world_size, 2, replace=False))
    slow = dict.fromkeys(job.groups_of(gpu, "dspt"), SLOW_GPU)
    slow |= dict.fromkeys(job.groups_of(nic, ACROSS), SLOW_NIC)
    communication = CommunicationRule(job.topology)
    compute = [StragglerRule(groups=len(job.peers)) for _ in job.peers]
    named: set[tuple[str, int | None]] = set()
    slowest = 0.0
    for number in range(CLEAN_CHECKS + SLOW_CHECKS):
        faulty = number >= CLEAN_CHECKS
        replay = REPLAY_S * np.exp(noise.normal(0, NOISE, job.topology.world_size))
        replay[gpu] *= SLOW_GPU if faulty else 1.0
        timings = job.timings(slow if faulty else {}, noise)
        begin = time.process_time()
        stragglers: set[int] = set()
        for rule, ranks in zip(compute, job.peers, strict=True):
            verdict = rule.update(
                "layer", dict(zip(ranks, replay[list(ranks)].tolist(), strict=True))
            )
            stragglers |= verdict.outliers if verdict.status is Status.ATTRIBUTED else set()
        diagnosis = communication.update(timings, compute_stragglers=stragglers).diagnosis
        slowest = max(slowest, time.process_time() - begin)
        named |= {("compute", rank) for rank in stragglers}
        named |= {(finding.conclusion, finding.rank) for finding in diagnosis.findings}
    truth = {("compute", gpu), ("machine", nic)}
    return Run(named == truth, len(named - truth), slowest)


def main() -> None:
    """Print how many runs were right, and how long a check took to judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=100, help="seeded runs")
    arguments, _ = parser.parse_known_args()
    job = Job()
    runs = [run(job, seed) for seed in range(arguments.runs)]
    wrong = [seed for seed, outcome in enumerate(runs) if not outcome.right or outcome.false]
    figures: dict[str, Any] = {
        "ranks": job.topology.world_size,
        "groups": len(job.groups),
        "runs": len(runs),
        "both_named": sum(r.right for r in runs),
        "false_findings": sum(r.false for r in runs),
        "seeds_that_went_wrong": wrong,
        "decide_cpu_s_median": round(float(np.median([r.decide_s for r in runs])), 3),
        "decide_cpu_s_worst": round(max(r.decide_s for r in runs), 3),
    }
    if arguments.json:
        print(json.dumps({"scale": figures}))
        return
    for name, value in figures.items():
        print(f"{name:>21}: {value if isinstance(value, list) else format(value, ',')}")


if __name__ == "__main__":
    main()
