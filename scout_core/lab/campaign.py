"""The campaign: hundreds of random corruptions in one process group, each named or missed.

Between two injections the state is put back and checks run until nothing is open any more, so each
injection meets a healthy job, and every clean check counts as a chance for a false alarm.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scout_core.decision.incident import Incident, Kind
from scout_core.evidence.capture import local_of
from scout_core.integration.session import Session
from scout_core.integration.workload import workers_of
from scout_core.lab.drill import DrillPlan, start, train_step
from scout_core.lab.faults import FaultAt, Magnitude, Persistence, Surface
from scout_core.lab.injection import inject
from scout_core.lab.model import GPTConfig, Text
from scout_core.lab.parallel import Parallelism

TINY = GPTConfig(layers=3, width=48, heads=4, context=24)


@dataclass(frozen=True)
class CampaignPlan:
    """One campaign on one layout."""

    parallelism: Parallelism
    ranks: int
    injections: int
    seed: int = 0
    min_low_bit: int = 0
    """At least this many injections flip one low mantissa bit of an output or gradient."""
    clean_checks: int = 1
    """Healthy checks between two injections, at least."""
    timeout_s: float = 900.0


@dataclass(frozen=True)
class Shot:
    """One injection and what was said about it."""

    fault: FaultAt
    named: tuple[int, ...]
    """Ranks named by any incident of it, ascending."""
    reasons: tuple[str, ...]
    checks: int
    """Checks until it was named."""

    @property
    def right(self) -> bool:
        """Exactly the faulty rank was named."""
        return self.named == (self.fault.rank,)


@dataclass(frozen=True)
class CampaignOutcome:
    """All shots of a campaign, and its healthy checks."""

    shots: list[Shot]
    clean_checks: int
    """Checks in healthy state."""
    false: list[dict[str, Any]]
    """Incidents in healthy state; not the whole group's slow-down, which a busy machine causes."""

    @property
    def missed(self) -> list[Shot]:
        """Shots whose rank was not named, or not alone."""
        return [shot for shot in self.shots if not shot.right]

    def summary(self) -> dict[str, Any]:
        """Counts as JSON values."""
        low = [s for s in self.shots if s.fault.magnitude is Magnitude.LOW_BIT]
        return {
            "injections": len(self.shots),
            "right": len(self.shots) - len(self.missed),
            "low_bit": len(low),
            "clean_checks": self.clean_checks,
            "false": len(self.false),
            "mean_checks": sum(s.checks for s in self.shots) / max(1, len(self.shots)),
            "surfaces": dict(Counter(s.fault.surface.value for s in self.shots)),
            "missed": [asdict(s) for s in self.missed],
        }


def draw_shots(plan: CampaignPlan) -> list[FaultAt]:
    """Draw rank, layer, surface, magnitude and persistence of every injection from the seed."""
    rng = random.Random(plan.seed)
    choices = list(Surface)
    faults = []
    for i in range(plan.injections):
        low = i < plan.min_low_bit
        near = [each for each in choices if each in (Surface.OUTPUT, Surface.GRADIENT)]
        surface = rng.choice(near if low else choices)
        faults.append(
            FaultAt(
                "sdc",
                rank=rng.randrange(plan.ranks),
                step=0,
                layer=rng.randrange(TINY.layers),
                surface=surface,
                magnitude=Magnitude.LOW_BIT if low else rng.choice(list(Magnitude)),
                persistence=rng.choice([Persistence.PERSISTENT, Persistence.INTERMITTENT]),
                seed=rng.randrange(1 << 30),
            )
        )
    rng.shuffle(faults)
    return faults


def run_campaign(plan: CampaignPlan) -> CampaignOutcome:
    """Run the campaign on gloo processes of this machine."""
    from scout_core.testing import run_ranks

    with tempfile.TemporaryDirectory(prefix="scout-campaign-") as folder:
        outcomes = run_ranks(plan.ranks, campaign_rank, plan, folder, timeout_s=plan.timeout_s)
    outcome: CampaignOutcome = outcomes[0]
    return outcome


class _Job:
    """A training job on one rank that can be broken and put back."""

    def __init__(self, rank: int, plan: CampaignPlan, folder: str) -> None:
        drill = DrillPlan(
            plan.parallelism, plan.ranks, (), 0, interval_steps=1, seed=plan.seed, model=TINY
        )
        self.rank = rank
        self.model, self.optimizer, self.session, self.target = start(
            rank, drill, folder, timing_repeats=2, kappa=1e6
        )
        self.seed = plan.seed
        self.step = 0
        self.text = Text(TINY.context)
        self.replica = workers_of(self.session.topology)[rank].replica

    def check(self) -> list[Incident]:
        """Train one step, with its check; return the new incidents."""
        before = len(self.session.incidents())
        batch = self.text.batch(self.seed, self.replica, self.step, 2)
        train_step(self.model, self.optimizer, batch)
        self.step += 1
        return self.session.incidents()[before:]

    def settle(self, at_least: int) -> tuple[int, list[Incident]]:
        """Check in healthy state until no fault is open; return checks and incidents."""
        checks, found = 0, []
        while checks < at_least or (self.session.has_open_fault and checks < 40):
            found += self.check()
            checks += 1
        return checks, found


def campaign_rank(rank: int, plan: CampaignPlan, folder: str) -> CampaignOutcome:
    """Run all shots on one rank."""
    job = _Job(rank, plan, folder)
    job.settle(6)  # every recipe once: arms it
    shots: list[Shot] = []
    false: list[dict[str, Any]] = []
    clean = 0
    most = _most_checks(job.session)
    for fault in draw_shots(plan):
        saved = snapshot(job.model, job.optimizer)
        undo = inject(fault, job.target) if rank == fault.rank else lambda: None
        found: list[Incident] = []
        checks = 0
        while checks < most and not any(i.culprits for i in found):
            found += job.check()
            checks += 1
        undo()
        restore(job.model, job.optimizer, saved)
        named = tuple(sorted({r for i in found for r in i.culprit_ranks}))
        shots.append(Shot(fault, named, tuple(sorted({i.reason for i in found})), checks))
        healthy, alarms = job.settle(plan.clean_checks)
        clean += healthy
        false += [i.to_json() for i in alarms if i.kind is not Kind.GROUP_SLOWDOWN]
    job.session.close()
    dist.barrier()
    return CampaignOutcome(shots, clean, false)


def _most_checks(session: Session) -> int:
    """Checks within which every site of every recipe has had its turn; twice, for chance."""
    return 4 * max(len(session.coverage().recipes), TINY.layers)


Saved = tuple[list[torch.Tensor], dict[int, dict[str, Any]]]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Saved:
    """Copy the local parts of parameters and optimizer state."""
    parameters = [local_of(p.detach()).clone() for p in model.parameters()]
    state = {
        i: {
            key: local_of(value).clone() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state.get(p, {}).items()
        }
        for i, p in enumerate(model.parameters())
    }
    return parameters, state


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    """Put back what `snapshot` copied, in place."""
    parameters, state = saved
    for i, parameter in enumerate(model.parameters()):
        local_of(parameter.detach()).copy_(parameters[i])
        for key, value in state[i].items():
            live = optimizer.state[parameter][key]
            if isinstance(live, torch.Tensor):
                local_of(live).copy_(value)
