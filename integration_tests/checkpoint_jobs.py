"""A small real DDP job that is checked, saved, broken and restarted; one body for all cases."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scout_core import enable_resiliency
from scout_core.config import CheckpointConfig
from scout_core.decision import consensus
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Kind
from scout_core.decision.labels import Failure, Label, Outcome
from scout_core.evidence.exchange import GroupExchange
from scout_core.evidence.signature import signature_tree
from scout_core.integration.checkpoint import GatedCheckpoint
from scout_core.integration.dcp_storage import DcpStorage
from scout_core.integration.gate_service import GateService
from scout_core.integration.restore_state import StateDict, TrainingState
from scout_core.integration.saves import Job
from scout_core.lab.drill import train_step
from scout_core.lab.faults import FaultAt, Magnitude, flip_bit
from scout_core.lab.injection import Target, inject
from scout_core.lab.model import GPT, GPTConfig, Text
from scout_core.lab.parallel import Parallelism, parallelise

RANKS = 4
RECIPES = ("hidden", "optimizer")


@dataclass(frozen=True)
class Case:
    """What happens in one launch."""

    steps: int = 14
    failure: str | None = None
    """Told to restore(); None leaves it to the record."""
    sweep_clean: bool | None = None
    """Result of the replay of the catalogue; None: it cannot be made."""
    corrupt: dict[int, int] = field(default_factory=dict)
    """Step -> rank one of whose weights gets a flipped bit before that step."""
    slow: dict[int, int] = field(default_factory=dict)
    """Step -> rank that is reported slow at that step's check."""
    kill: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Step -> ranks that die by SIGKILL while they write that step's checkpoint."""
    asynchronous: bool = False
    deadline_s: float = 30.0
    """Of every exchange, save and load; survivors of a killed rank may wait that long for it."""


@dataclass(frozen=True)
class Result:
    """What one rank saw."""

    resumed: int
    """Step that training went on from."""
    stopped: str
    """Failure that ended it; empty when all steps were made."""
    step: int
    state: str
    """Signature of parameters and optimizer state at the end, in hex."""
    labels: tuple[Label, ...]


class DiesWhenWritten:
    """State whose rank is killed in the middle of writing its file."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


class Trainer:
    """One rank of one launch."""

    def __init__(self, rank: int, run: pathlib.Path, case: Case) -> None:
        self.rank, self.case = rank, case
        torch.manual_seed(0)
        layers = [nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
        # Without it DDP changes its buckets after the first step of each process, and with them
        # the order of summation: a restarted run would differ in the last bits.
        self.model = DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.exchange = GroupExchange(torch.device("cpu"), case.deadline_s)
        job = Job(len(RECIPES), name="tiny")
        self.service = GateService(run / "checkpoints", self.exchange, job, self.emit)
        self.checkpoint = GatedCheckpoint(
            self.service,
            DcpStorage(case.deadline_s),
            CheckpointConfig(memory_dir=str(run / "memory"), keep_last=2),
            TrainingState(self.model, self.optimizer),
            self.emit,
            case.deadline_s,
        )
        self.step = 0

    def emit(self, event: str, **fields: Any) -> None:
        print(
            f"rank {self.rank} step {getattr(self, 'step', 0)}: {event} {fields}", file=sys.stderr
        )

    def run(self) -> Result:
        """Restore, then train to the end or to the first fault that stops the job."""
        sweep = None if self.case.sweep_clean is None else (lambda: bool(self.case.sweep_clean))
        self.step = resumed = self.checkpoint.restore(
            self.case.failure, sweep=sweep, start_over=True
        )
        labels: list[Label] = []
        stopped = ""
        while self.step < self.case.steps and not stopped:
            self.train_step()
            outcome = self.check()
            if outcome in (Outcome.SDC, Outcome.STRAGGLER):
                stopped = outcome.value
            if outcome is not Outcome.SDC:
                labels.append(self.save())
        if stopped:
            self.checkpoint.wait()
            self.service.stop(Failure(stopped))
        else:
            self.checkpoint.close()
        return Result(resumed, stopped, self.step, self.signature(), tuple(labels))

    def train_step(self) -> None:
        self.step += 1
        if self.case.corrupt.get(self.step) == self.rank:
            with torch.no_grad():
                weight = next(iter(self.model.parameters()))
                flip_bit(weight.view(-1)[5:6], Magnitude.MID_BIT)
        generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
        batch = torch.randn(8, 16, generator=generator)
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def check(self) -> Outcome:
        """The state audit: all replicas sign their parameters and compare."""
        mine = signature_tree(dict(self.model.named_parameters()))
        told = self.exchange.all_gather(repr(mine).encode(), tuple(range(RANKS)))
        verdict = consensus.exact(told)
        outcome = Outcome.CLEAN
        if self.case.slow.get(self.step) == self.rank:
            outcome = Outcome.STRAGGLER
        if verdict.status is Status.ATTRIBUTED:
            outcome = Outcome.SDC
        recipe = RECIPES[self.step % len(RECIPES)]
        return self.service.record(self.step, recipe, outcome, ["audit"])

    def save(self) -> Label:
        state: StateDict = {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
        }
        if self.rank in self.case.kill.get(self.step, ()):
            state[f"last words of {self.rank}"] = DiesWhenWritten()
        if self.case.asynchronous:
            return self.checkpoint.async_save(self.step, state)
        return self.checkpoint.save(self.step, state)

    def signature(self) -> str:
        moments = [self.optimizer.state[p] for p in self.model.parameters()]
        return str(signature_tree([dict(self.model.named_parameters()), moments]))


def launch(rank: int, run: str, case: Case) -> Result | str:
    """Run one rank; survivors of a killed one return the error that they saw."""
    trainer = Trainer(rank, pathlib.Path(run), case)
    if not case.kill:
        return trainer.run()
    try:
        return trainer.run()
    except BaseException as error:  # noqa: BLE001 -- DCP's own derives from it
        return f"{type(error).__name__}: {error}"


def watched(rank: int, run: str, steps: int, fault: FaultAt | None) -> Result:
    """Train under a real session until the end, or until it reports a corruption."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(layers=2, width=32, heads=2, context=16))
    model, mesh = parallelise(gpt, Parallelism.DDP, RANKS, fixed_buckets=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "interval_steps": 1,
        "timing_repeats": 2,
        "on_error": "raise",
        "hang": {"enabled": False, "checkpoint_timeout_s": 60},
        "communication": {"probe_interval_steps": 0},
        "checkpoint": {"memory_dir": f"{run}/memory"},
    }
    session = enable_resiliency(model, optimizer, config, mesh=mesh, run_dir=run)
    checkpoint = session.checkpoint(f"{run}/checkpoints")
    step = resumed = session.restore(start_over=True)
    text, labels, stopped = Text(16), [], ""
    while step < steps and not stopped:
        if fault is not None and (step, rank) == (fault.step, fault.rank):
            inject(fault, Target(list(gpt.layers), optimizer))
        train_step(model, optimizer, text.batch(0, rank, step, 4))
        step += 1
        stopped = next((i.kind.value for i in session.incidents() if i.kind is Kind.SDC), "")
        state: StateDict = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        labels.append(checkpoint.save(step, state))
    if not stopped:
        checkpoint.close()
    moments = [optimizer.state[parameter] for parameter in model.parameters()]
    signature = str(signature_tree([dict(model.named_parameters()), moments]))
    session.close()
    return Result(resumed, stopped, step, signature, tuple(labels))
