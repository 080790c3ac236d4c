"""The drill: train a small real model on several processes, break it, and see who is named."""

from __future__ import annotations

import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scout_core.config import ScoutConfig
from scout_core.decision.incident import Incident
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import GroupExchange
from scout_core.integration.enable import attach
from scout_core.integration.models import Patterns
from scout_core.integration.pytorch import PyTorch
from scout_core.integration.session import Session
from scout_core.integration.workload import WINDOW_STEPS, workers_of
from scout_core.lab import moe_catalog
from scout_core.lab.faults import FaultAt
from scout_core.lab.injection import Target, acts_on, inject
from scout_core.lab.model import GPT, GPTConfig, Text, loss_of
from scout_core.lab.moe import MoEConfig, moe_gpt
from scout_core.lab.parallel import Parallelism, host_names, parallelise, topology
from scout_core.lab.pipeline import STAGES, Stage
from scout_core.report.events import RunDir

REPORTED_AS: dict[str, tuple[str, ...]] = {
    "sdc": ("SDC_",),
    "gradient": ("SDC_",),
    "straggler": ("STRAGGLER_COMPUTE",),
    "slow_nic": ("STRAGGLER_NETWORK",),
    "slow_link": ("STRAGGLER_LINK",),
    "slow_machine": ("STRAGGLER_MACHINE",),
    "contention": ("SLOWDOWN_CLUSTER",),
    "group_slowdown": ("SLOWDOWN_GROUP",),
    "rotating_pauses": ("IMBALANCE_PAUSES",),
    "stage_imbalance": ("IMBALANCE_STAGE",),
    "sequence_imbalance": ("IMBALANCE_DATA",),
    "slow_loading": ("IMBALANCE_LOADING",),
    "hang": ("HANG_",),
}
"""Beginnings of the reason codes that a fault of each kind is rightly reported with."""
NAMES_A_RANK = ("sdc", "gradient", "straggler", "slow_machine", "hang")
"""Kinds of fault whose report must name the faulty rank; all others must name nobody."""
EXPERT_STAGES = r"moe\.experts$"  # names of the expert stages
LEARNS = ("slow_nic", "contention", "group_slowdown")
"""Kinds of fault that all siblings share, so that only the past shows them."""
FIRST_STEP = {"straggler": 8, **dict.fromkeys(LEARNS, 16)}
"""Steps before which faults would come while the rules still learn what is usual."""
UNEVEN = ("rotating_pauses", "stage_imbalance", "sequence_imbalance", "slow_loading")
"""Kinds of fault that are told from windows of the job's own work."""


def layers_per_rank(parallelism: Parallelism, model: GPTConfig) -> int:
    """Hidden layers that each rank has at least."""
    return model.layers // (STAGES if parallelism is Parallelism.PP_FSDP else 1)


@dataclass(frozen=True)
class DrillPlan:
    """One drill."""

    parallelism: Parallelism
    ranks: int
    faults: tuple[FaultAt, ...]
    steps: int
    interval_steps: int = 2
    seed: int = 0
    batch: int = 4
    model: GPTConfig = field(default_factory=GPTConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Of the parallelism "moe"."""
    ranks_per_host: int | None = None
    """Hosts are simulated by labels; None: one host."""
    timeout_s: float = 300.0

    @property
    def config(self) -> dict[str, Any]:
        """What the session of this drill is configured with."""
        kinds = {fault.kind for fault in self.faults}
        probes = kinds & {"slow_nic", "slow_link", "slow_machine", "contention"}
        return {
            "interval_steps": self.interval_steps,
            "job": "drill",
            "hang": {"enabled": "hang" in kinds, "stall_timeout_s": 2.0},
            "communication": {"probe_interval_steps": 1 if probes else 0, "probe_bytes": 4096},
            "workload": {"interval_steps": WINDOW_STEPS if kinds & set(UNEVEN) else 0},
        }

    def __post_init__(self) -> None:
        topology(self.parallelism, self.ranks, self.ranks_per_host)
        if len({fault.rank for fault in self.faults}) > self.ranks:
            raise ScoutError(f"{len(self.faults)} faulty ranks, but only {self.ranks} ranks")
        for fault in self.faults:
            if not 0 <= fault.rank < self.ranks:
                raise ScoutError(
                    f"--fault rank={fault.rank} does not exist with --ranks {self.ranks}; "
                    f"use 0..{self.ranks - 1}"
                )
            layers = layers_per_rank(self.parallelism, self.model)
            if not 0 <= fault.layer < layers:
                raise ScoutError(
                    f"--fault layer={fault.layer} does not exist; a rank has layers 0..{layers - 1}"
                )
            if fault.rows is not None:
                self._refuse_rows(fault.rows)

    @property
    def has_experts(self) -> bool:
        """The layers are mixtures of experts."""
        return self.parallelism is Parallelism.MOE

    def _refuse_rows(self, rows: int) -> None:
        unit, most = self.moe.alignment, self.moe.most_rows
        if not self.has_experts:
            raise ScoutError(f"--fault rows={rows} needs experts: use --parallelism moe")
        if rows % unit or not unit <= rows <= most:
            raise ScoutError(
                f"--fault rows={rows} never occurs: rows of an expert are padded to multiples of "
                f"{unit}; use {unit} to {most}"
            )


@dataclass(frozen=True)
class DrillOutcome:
    """What was injected, what was reported, and what it cost."""

    injected: list[dict[str, Any]]
    """Each fault with `found` and `latency_steps` (None when missed)."""
    missed: list[dict[str, Any]]
    false: list[dict[str, Any]]
    """Incidents that name somebody no fault explains."""
    incidents: list[Incident]
    coverage: str
    loss: list[float]
    """Mean training loss of rank 0, per step."""
    overhead: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Every injected fault was found and nothing else was."""
        return not self.missed and not self.false


@dataclass(frozen=True)
class RankResult:
    """What one rank brings home."""

    incidents: list[Incident]
    coverage: str
    loss: list[float]
    plain_s: list[float]
    checked_s: list[float]
    recipes: int


def run_drill(plan: DrillPlan) -> DrillOutcome:
    """Run the plan on gloo processes of this machine and compare reports with faults.

    Raises:
        RankFailed: a process died or was late for another reason than its fault.
    """
    from scout_core.testing import run_ranks

    with tempfile.TemporaryDirectory(prefix="scout-drill-") as folder:
        if plan.has_experts:
            layout = topology(plan.parallelism, plan.ranks)
            moe_catalog.write(folder, plan.model.width, plan.moe, layout)
        results = run_ranks(plan.ranks, drill_rank, plan, folder, timeout_s=plan.timeout_s)
    return judge(plan, replace(results[0], loss=results[-1].loss))  # the last stage has a loss


def judge(plan: DrillPlan, seen: RankResult) -> DrillOutcome:
    """Match incidents with faults: each needs a report of its kind that names its rank, if any."""
    injected = []
    for fault in plan.faults:
        hit = next((i for i in seen.incidents if _reports(fault, i) and _at(fault, i)), None)
        latency = None if hit is None else hit.step - fault.step
        injected.append({**asdict(fault), "found": hit is not None, "latency_steps": latency})
    false = [
        incident.to_json()
        for incident in seen.incidents
        if not all(
            any(fault.rank == rank and _reports(fault, incident) for fault in plan.faults)
            for rank in incident.culprit_ranks
        )
    ]
    return DrillOutcome(
        injected,
        [row for row in injected if not row["found"]],
        false,
        seen.incidents,
        seen.coverage,
        seen.loss,
        _overhead(plan, seen),
    )


def _reports(fault: FaultAt, incident: Incident) -> bool:
    if incident.step < fault.step or not incident.reason.startswith(
        REPORTED_AS.get(fault.kind, ())
    ):
        return False
    return fault.rank in incident.culprit_ranks if fault.kind in NAMES_A_RANK else True


def _at(fault: FaultAt, incident: Incident) -> bool:
    """A fault at one row count is found when that is named, too."""
    return fault.rows is None or fault.rows in incident.evidence.get("rows", ())


def _overhead(plan: DrillPlan, seen: RankResult) -> dict[str, float]:
    """Cost of the checks as a share of training, measured and by the model V/(I*N)."""
    if not seen.plain_s or not seen.checked_s:
        return {}
    plain = statistics.median(seen.plain_s)
    check = statistics.median(seen.checked_s) - plain
    variants = ScoutConfig().timing_repeats + 2  # repeats of the timed layer and of the other
    return {
        "step_s": plain,
        "check_s": check,
        "measured": check / (plain * plan.interval_steps),
        "model": variants / (plan.interval_steps * plan.model.layers),
    }


def drill_rank(rank: int, plan: DrillPlan, folder: str) -> RankResult:
    """Train on one rank; called in a process of its own with a process group."""
    model, optimizer, session, target = start(rank, plan, folder)
    batches = Batches(plan, workers_of(session.topology)[rank].replica)
    losses: list[float] = []
    plain_s: list[float] = []
    checked_s: list[float] = []
    for step in range(plan.steps):
        for fault in plan.faults:
            if fault.step == step and acts_on(fault, rank, session.topology):
                inject(fault, target)
        batch = batches.of(step)
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, batch))
        spent = time.perf_counter() - begin
        checked = (step + 1) % plan.interval_steps == 0
        (checked_s if checked else plain_s).append(spent)
    coverage = session.coverage()
    found = session.incidents()
    known = {incident.id for incident in found}
    # Hangs are reported by the observer, out of band.
    found += [incident for incident in RunDir(folder).incidents() if incident.id not in known]
    session.close()
    dist.barrier()
    return RankResult(found, coverage.line(), losses, plain_s, checked_s, len(coverage.recipes))


class Batches:
    """The batches of one replica, with the faults that lie in the data."""

    def __init__(self, plan: DrillPlan, replica: int) -> None:
        self._plan = plan
        self._replica = replica
        self._text = Text(plan.model.context)

    def of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and targets of one step, each (batch, length)."""
        plan = self._plan
        inputs, targets = self._text.batch(plan.seed, self._replica, step, plan.batch)
        for fault in plan.faults:
            if fault.kind == "slow_loading" and step >= fault.step:
                time.sleep(fault.delay_s)
            if fault.kind == "sequence_imbalance" and step >= fault.step:
                draw = random.Random(f"{fault.seed} {self._replica} {step}")
                length = draw.randint(plan.model.context // 4, plan.model.context)
                inputs, targets = inputs[:, :length], targets[:, :length]
        return inputs.contiguous(), targets.contiguous()


def start(
    rank: int, plan: DrillPlan, folder: str, **config_fields: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Session, Target]:
    """Build model, optimizer and session as `enable_resiliency` does, and what faults act on.

    Args:
        config_fields: overrides of `ScoutConfig`.
    """
    torch.manual_seed(plan.seed)
    inner = moe_gpt(plan.model, plan.moe) if plan.has_experts else GPT(plan.model)
    model, mesh = parallelise(inner, plan.parallelism, plan.ranks)
    layers = list(model.layers if isinstance(model, Stage) else inner.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(plan.seed * 1009 + rank)
    if plan.has_experts:
        catalogue = str(pathlib.Path(folder) / moe_catalog.CATALOGUE)
        config_fields = {
            "experts": {"modules": EXPERT_STAGES, "catalogue": catalogue},
            **config_fields,
        }
    config = ScoutConfig.parse({**plan.config, **config_fields}, "the drill's configuration")
    exchange = GroupExchange(torch.device("cpu"), config.exchange_timeout_s)
    patterns = Patterns(experts=config.experts.modules)
    framework = _Drilled(model, optimizer, mesh, patterns, plan.ranks_per_host)
    session = attach(framework, config, run_dir=folder, exchange=exchange)
    experts = [(s.module, s.experts) for s in framework.sites() if s.experts is not None]
    place = pathlib.Path(folder)
    target = Target(layers, optimizer, framework, exchange, session.topology, place, experts)
    return model, optimizer, session, target


class _Drilled(PyTorch):
    """Plain PyTorch on simulated hosts."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | None,
        patterns: Patterns,
        ranks_per_host: int | None,
    ) -> None:
        super().__init__(model, optimizer, mesh, patterns)
        self._ranks_per_host = ranks_per_host

    def topology(self) -> Topology:
        found = super().topology()
        if self._ranks_per_host is None:
            return found
        return replace(found, hosts=host_names(found.world_size, self._ranks_per_host))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """One optimizer step on one batch; returns the loss, nan on stages that have none."""
    optimizer.zero_grad()
    if isinstance(model, Stage):
        loss = model.train_batch(*batch)
    else:
        computed = loss_of(model, *batch)
        computed.backward()  # type: ignore[no-untyped-call]
        loss = float(computed.detach())
    optimizer.step()
    return loss


def draw_fault(kind: str, plan_ranks: int, layers: int, seed: int, **fixed: Any) -> FaultAt:
    """Draw what is not fixed: rank, layer, first step and element, from the seed."""
    rng = random.Random(seed)
    drawn: dict[str, Any] = {
        "rank": rng.randrange(plan_ranks),
        "layer": rng.randrange(layers),
        "step": rng.randrange(4, 9) + FIRST_STEP.get(kind, 0),
        "seed": rng.randrange(1 << 30),
    }
    if kind == "stage_imbalance":
        drawn["step"] = 0  # a stage that becomes slow later is a group that becomes slow
    if kind == "group_slowdown":
        drawn["percent"] = 20.0
    return FaultAt(kind, **{**drawn, **fixed})


def steps_needed(faults: Sequence[FaultAt], interval_steps: int, layers: int) -> int:
    """Steps after which a fault of any layer, or three slow checks, must have been seen."""
    last = max((fault.step for fault in faults), default=0)
    checks = 16 if any(fault.kind in LEARNS for fault in faults) else max(layers, 5) + 4
    windows = 3 * WINDOW_STEPS if any(fault.kind in UNEVEN for fault in faults) else 0
    return last + max(interval_steps * checks, windows)
