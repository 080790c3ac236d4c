"""Training jobs on the lab's mixture of experts, broken at chosen row counts; bodies for ranks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from integration_tests.jobs import raw
from scout_core.decision.incident import Incident
from scout_core.evidence.row_log import rows_of
from scout_core.lab.drill import DrillPlan, start, train_step
from scout_core.lab.faults import FaultAt, Magnitude, Surface
from scout_core.lab.injection import inject
from scout_core.lab.model import GPTConfig, Text, loss_of
from scout_core.lab.moe import MoEConfig, moe_gpt
from scout_core.lab.parallel import Parallelism, parallelise, plain_parameters

MODEL = GPTConfig(layers=2, width=32, heads=2, context=24)
QUIET = {"timing_repeats": 2, "kappa": 1e6, "on_error": "raise"}  # time is not judged here


def plan_of(ranks: int, seed: int, most_rows: int = 64) -> DrillPlan:
    """A job whose catalogue holds the multiples of 8 up to `most_rows`."""
    moe = MoEConfig(experts=4, alignment=8, most_rows=most_rows)
    return DrillPlan(
        Parallelism.MOE, ranks, (), 0, interval_steps=1, seed=seed, model=MODEL, moe=moe
    )


@dataclass
class Seen:
    """What one rank brings home."""

    lines: list[str] = field(default_factory=list)
    """Coverage at the start and at the end."""
    recipes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    checks: list[int] = field(default_factory=list)
    """Checks until each fault was named with its rows."""
    faults: list[FaultAt] = field(default_factory=list)
    incidents: list[list[Incident]] = field(default_factory=list)
    """Per fault."""
    healthy: list[Incident] = field(default_factory=list)
    """Incidents before the first fault."""
    sweeps: list[bool] = field(default_factory=list)
    """Whether replaying the whole catalogue at once was clean."""
    executed: tuple[int, int] = (0, 0)
    """Rows that the session accounts for, and rows that a hook of the job's own counted."""


class Job:
    """One rank of a job that can be broken and mended."""

    def __init__(self, rank: int, plan: DrillPlan, folder: str, **config: Any) -> None:
        self.rank, self.plan = rank, plan
        self.model, self.optimizer, self.session, self.target = start(
            rank, plan, folder, **{**QUIET, **config}
        )
        self.text = Text(MODEL.context)
        self.step = 0
        self.counted: Counter[int] = Counter()
        """Row counts of all experts on this rank, in training alone."""
        for module, calls in self.target.experts:
            module.register_forward_pre_hook(
                lambda m, args, calls=calls: self.counted.update(rows_of(calls.counts(args, {})[0]))
            )
        self.seen = Seen([self.session.coverage().line()])

    def steps(self, number: int) -> list[Incident]:
        """Train, with a check after each step; return the new incidents."""
        before = len(self.session.incidents())
        for _ in range(number):
            batch = self.text.batch(self.plan.seed, self.rank, self.step, 2)
            train_step(self.model, self.optimizer, batch)
            self.step += 1
        return self.session.incidents()[before:]

    def break_until_named(self, fault: FaultAt, most: int) -> None:
        """Break a rank until its rows are named, at most for so many checks; then mend it."""
        undo = inject(fault, self.target) if fault.rank == self.rank else lambda: None
        found: list[Incident] = []
        checks = 0
        while checks < most and not any(fault.rows in i.evidence.get("rows", ()) for i in found):
            found += self.steps(1)
            checks += 1
        undo()
        self.seen.faults.append(fault)
        self.seen.checks.append(checks)
        self.seen.incidents.append(found)

    def sweep(self, fault: FaultAt | None = None) -> None:
        """Replay the whole catalogue at once, with a broken rank."""
        broken = fault is not None and fault.rank == self.rank
        undo = inject(fault, self.target) if fault is not None and broken else lambda: None
        batch = self.text.batch(self.plan.seed, self.rank, self.step, 2)
        clean = self.session.full_sweep(lambda: loss_of(self.model, *batch).backward())
        undo()
        self.seen.sweeps.append(clean)

    def end(self) -> Seen:
        """Close the session and return what was seen."""
        coverage = self.session.coverage()
        shares = [each.shares for each in coverage.experts if each.shares is not None]
        self.seen.executed = sum(each.executed for each in shares), sum(self.counted.elements())
        self.seen.lines.append(coverage.line())
        self.seen.recipes, self.seen.not_covered = coverage.recipes, coverage.not_covered
        self.session.close()
        dist.barrier()
        return self.seen


def draw_fault(draw: random.Random, rank: int, rows: int) -> FaultAt:
    """A persistent corruption at one row count."""
    return FaultAt(
        "sdc",
        rank,
        step=0,
        surface=draw.choice([Surface.OUTPUT, Surface.GRADIENT]),
        magnitude=draw.choice([Magnitude.LOW_BIT, Magnitude.MID_BIT, Magnitude.SIGN]),
        rows=rows,
        seed=draw.randrange(1 << 30),
    )


def each_rank_in_turn(rank: int, plan: DrillPlan, folder: str, faulty: list[int]) -> Seen:
    """Break each of these ranks at a drawn row count of the catalogue."""
    job = Job(rank, plan, folder)
    size = plan.moe.most_rows // plan.moe.alignment
    job.seen.healthy = job.steps(size)  # every recipe once: arms it
    draw = random.Random(plan.seed)
    for each in faulty:
        rows = plan.moe.alignment * draw.randint(1, size)
        job.break_until_named(draw_fault(draw, each, rows), most=2 * size)
    job.sweep()
    job.sweep(job.seen.faults[-1])
    return job.end()


def executed_rows(rank: int, plan: DrillPlan, folder: str, faulty: int, experts: Any) -> Seen:
    """Break a rank at the row count beyond the catalogue that it executes most often."""
    job = Job(rank, plan, folder, experts=experts)
    job.seen.healthy = job.steps(4)
    known = plan.moe.most_rows
    mine = [rows for rows, _ in job.counted.most_common() if rows > known] or [0]
    told: list[Any] = [None] * plan.ranks
    dist.all_gather_object(told, mine[0])
    job.break_until_named(draw_fault(random.Random(plan.seed), faulty, told[faulty]), most=24)
    return job.end()


def uncovered(rank: int, plan: DrillPlan, folder: str, experts: Any) -> Seen:
    """Train without replays of experts."""
    job = Job(rank, plan, folder, experts=experts)
    job.seen.healthy = job.steps(2)
    return job.end()


def off_and_on(rank: int, plan: DrillPlan, folder: str, steps: int) -> list[Any]:
    """Train without SCOUT, then with everything on; return losses and parameters of both."""
    results = []
    for on in (False, True):
        torch.manual_seed(plan.seed)
        if on:
            every = {"probe_interval_steps": 2, "probe_bytes": 256}
            job = Job(rank, plan, folder, communication=every)
            model, optimizer = job.model, job.optimizer
        else:
            whole = moe_gpt(plan.model, plan.moe)
            model, _ = parallelise(whole, plan.parallelism, plan.ranks)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        text = Text(MODEL.context)
        losses = [
            train_step(model, optimizer, text.batch(plan.seed, rank, step, 2))
            for step in range(steps)
        ]
        results.append((losses, [raw(each) for each in plain_parameters(model)]))
        dist.barrier()
    seen = job.end()
    return [*results, seen, job.session.incidents()]


def damaged_payload(rank: int, plan: DrillPlan, folder: str, faulty: int) -> list[Incident]:
    """Flip a bit of what one rank receives in all-to-all replays."""
    every = {"probe_interval_steps": 1, "probe_bytes": 256}
    job = Job(rank, plan, folder, communication=every, experts={})
    job.seen.healthy = job.steps(2)
    original = job.target.exchange.all_to_all

    def all_to_all(sent: torch.Tensor, received: torch.Tensor, *rest: Any) -> None:
        original(sent, received, *rest)
        received[0] ^= 1 << 20

    if rank == faulty:
        job.target.exchange.all_to_all = all_to_all
    found = job.steps(2)
    assert job.seen.healthy == []
    job.end()
    return found
