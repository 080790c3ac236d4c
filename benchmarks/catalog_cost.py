"""What following experts costs a training step and a check: ratios of one interleaved run.

    python -m benchmarks.catalog_cost [--json] [--rounds 60]

Five jobs of the lab's mixture of experts train side by side on the same 4 processes, one step each
in turn, in rotating order: a ratio compares steps of one round, so that a busy machine slows both.
CPU time of the process is compared beside wall time, because waiting for the cores is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from scout_core.decision.catalog import build_catalog, exact_observation
from scout_core.decision.expert_replay import ExpertReplays, Launches
from scout_core.evidence.exchange import LocalExchange, run_threads
from scout_core.integration.expert_calls import ExpertKernels, PackedCalls
from scout_core.integration.expert_facts import ExpertClass
from scout_core.integration.experts import Experts
from scout_core.integration.framework import Site
from scout_core.lab import moe_catalog
from scout_core.lab.drill import EXPERT_STAGES, DrillPlan, start, train_step
from scout_core.lab.model import GPTConfig, Text
from scout_core.lab.moe import MoEConfig, moe_gpt
from scout_core.lab.parallel import Parallelism, parallelise, topology
from scout_core.testing import run_ranks

RANKS = 4
NEVER = 1_000_000_000
MODEL = GPTConfig(layers=4, width=64, heads=4, context=64)
MOE = MoEConfig(experts=4, alignment=16, most_rows=512)
SAMPLED = {"experts": {"modules": EXPERT_STAGES}}
JOBS: dict[str, dict[str, Any] | None] = {
    "without SCOUT": None,
    "idle hooks": {"interval_steps": NEVER, "experts": {}},
    "idle hooks, rows accounted for": {"interval_steps": NEVER},
    "a check every step, no catalogue": {"interval_steps": 1, **SAMPLED},
    "a check every step, catalogue": {"interval_steps": 1},
}
"""What each job's session is configured with; the catalogue is named where nothing else is."""
RATIOS = (
    ("idle hooks", "without SCOUT"),
    ("idle hooks, rows accounted for", "without SCOUT"),
    ("idle hooks, rows accounted for", "idle hooks"),
    ("a check every step, no catalogue", "without SCOUT"),
    ("a check every step, catalogue", "without SCOUT"),
    ("a check every step, catalogue", "a check every step, no catalogue"),
)


class _Job:
    """One training job of this rank."""

    def __init__(self, rank: int, plan: DrillPlan, folder: str, config: dict[str, Any] | None):
        if config is None:
            torch.manual_seed(plan.seed)
            self.model, _ = parallelise(moe_gpt(plan.model, plan.moe), plan.parallelism, plan.ranks)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
            self.session = None
        else:
            self.model, self.optimizer, self.session, _ = start(rank, plan, folder, **config)
        self._rank, self._plan, self._step = rank, plan, 0
        self._text = Text(plan.model.context)

    def step(self) -> tuple[float, float]:
        """Wall and CPU seconds of one step; making the batch is not in them."""
        batch = self._text.batch(self._plan.seed, self._rank, self._step, self._plan.batch)
        self._step += 1
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        train_step(self.model, self.optimizer, batch)
        return time.perf_counter() - begin, time.process_time() - cpu


def _train(rank: int, plan: DrillPlan, folder: str, rounds: int) -> dict[str, Any]:
    jobs = {name: _Job(rank, plan, folder, config) for name, config in JOBS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    names = list(jobs)
    for turn in range(-5, rounds):  # the first ones warm up
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            seconds = jobs[name].step()
            if turn >= 0:
                times[name].append(seconds)
    sessions = {name: job.session for name, job in jobs.items() if job.session is not None}
    coverage = sessions["a check every step, catalogue"].coverage()
    result = {
        "steps_s": times,
        "coverage": coverage.line(),
        "incidents": [i.reason for session in sessions.values() for i in session.incidents()],
    }
    for session in sessions.values():
        session.close()
    return result


def _ratios(times: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    rows = []
    for over, under in RATIOS:
        row: dict[str, Any] = {"of": over, "to": under}
        for place, clock in enumerate(("wall", "cpu")):
            pairs = zip(times[over], times[under], strict=True)
            row[clock] = statistics.quantiles([a[place] / b[place] for a, b in pairs], n=4)
        rows.append(row)
    return rows


class _Stage(nn.Module):
    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return tokens


def _calls(exchange: LocalExchange, calls: int = 2000) -> dict[str, float]:
    """Microseconds of one call's hook, and of accounting for it at the next check."""
    stage = _Stage()
    kernels = ExpertKernels("library", "1", "settings", "float32", 2, 2, num_experts=8)
    site = Site("experts", stage, "expert", "E", "expert", experts=PackedCalls(stage, kernels))
    catalog = build_catalog(exact_observation((n,)) for n in range(1, 513))
    replays = ExpertReplays("E", Launches(8, False), catalog, exact_observation, slots=2)
    tokens = torch.zeros(1, 2)
    counts = torch.randint(1, 513, (calls, 8), generator=torch.Generator().manual_seed(0))

    def run() -> float:
        begin = time.perf_counter()
        for each in counts:
            stage(tokens, each)
        return 1e6 * (time.perf_counter() - begin) / calls

    bare = min(run() for _ in range(5))
    classes = {"E": ExpertClass("a catalogue", replays=replays)}
    experts = Experts([site], classes, exchange, lambda error: None, lambda: 1)
    hooked, looked_up = [], []
    for _ in range(5):
        hooked.append(run())
        begin = time.perf_counter()
        experts.plan("E", was_called=True)
        looked_up.append(1e6 * (time.perf_counter() - begin) / calls)
    experts.close()
    return {"hook_us": min(hooked) - bare, "look_up_us": min(looked_up)}


def run(rounds: int) -> dict[str, Any]:
    """Measure on 4 gloo processes; figures of rank 0."""
    plan = DrillPlan(Parallelism.MOE, RANKS, (), 0, model=MODEL, moe=MOE)
    with tempfile.TemporaryDirectory() as folder:
        layout = topology(plan.parallelism, plan.ranks)
        moe_catalog.write(folder, plan.model.width, plan.moe, layout)
        seen = run_ranks(RANKS, _train, plan, folder, rounds, timeout_s=900)[0]
    times = seen["steps_s"]
    return {
        "rounds": rounds,
        "step_s": {
            name: statistics.median(wall for wall, _ in each) for name, each in times.items()
        },
        "ratios": _ratios(times),
        "coverage": seen["coverage"],
        "incidents": seen["incidents"],
        "call": run_threads(1, _calls)[0],
    }


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    title = f"Experts on {RANKS} gloo ranks, CPU: {result['rounds']} interleaved rounds"
    table = Table("steps of", "to steps of", "wall time", "CPU time", title=title)
    for row in result["ratios"]:
        table.add_row(row["of"], row["to"], *(_quartiles(row[clock]) for clock in ("wall", "cpu")))
    console.print(table)
    call = result["call"]
    console.print(f"one call of 8 experts: {call['hook_us']:.1f} us in the forward pass,")
    console.print(f"{call['look_up_us']:.1f} us to look it up, once its check has come")
    console.print(result["coverage"])
    console.print(f"incidents: {', '.join(result['incidents']) or 'none'}")


def _quartiles(ratios: list[float]) -> str:
    low, middle, high = ratios
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each job")
    arguments = parser.parse_args()
    result = run(arguments.rounds)
    if arguments.json:
        print(json.dumps({"schema": "scout.benchmark.catalog_cost/1", **result}))
    else:
        print_report(result, Console())


if __name__ == "__main__":
    main()
