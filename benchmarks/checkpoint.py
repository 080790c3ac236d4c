"""Checkpoints: how far a corruption throws a job back, how long that takes, what labels cost."""

from __future__ import annotations

import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scout_core.config import ScoutConfig
from scout_core.decision.gate import CheckpointGate
from scout_core.evidence.exchange import GroupExchange
from scout_core.integration.checkpoint import GatedCheckpoint, Manager, open_checkpoint
from scout_core.integration.dcp_storage import DcpStorage
from scout_core.integration.restore_state import StateDict, TrainingState
from scout_core.integration.saves import Job
from scout_core.testing import run_ranks

INTERVALS = (1, 5, 20)
SIZES = (1, 4, 16)  # K
FAULTS = 400
RANKS = 2
SAVES = 7
STATE_MIB = (64, 512)


@dataclass(frozen=True)
class Distance:
    """Steps between the check that found a corruption and the checkpoint that is chosen."""

    interval_steps: int
    catalog_size: int
    mean: float
    worst: int

    @property
    def mean_by_formula(self) -> float:
        """I*(3K+1)/2: the verified one is K+1 .. 2K checks old when a check finds a fault."""
        return self.interval_steps * (3 * self.catalog_size + 1) / 2

    @property
    def worst_by_formula(self) -> int:
        """2*K*I."""
        return 2 * self.catalog_size * self.interval_steps


def distance(interval_steps: int, catalog_size: int, seed: int = 0) -> Distance:
    """Let faults begin at random steps, each seen by one random recipe only."""
    draw = random.Random(seed)
    found = []
    for _ in range(FAULTS):
        begins = draw.randint(2 * catalog_size + 1, 4 * catalog_size) * interval_steps
        begins += draw.randint(0, interval_steps - 1)
        recipe = draw.randrange(catalog_size)
        gate, check = CheckpointGate(catalog_size), 0
        while not gate.doubts.condemned:
            check += 1
            step = check * interval_steps
            is_seen = step >= begins and check % catalog_size == recipe
            gate.on_check(step, check % catalog_size, "sdc" if is_seen else "clean")
            gate.on_save(step)
        chosen = gate.retrieve("sdc").step
        assert chosen is not None
        found.append(check * interval_steps - chosen)
    return Distance(interval_steps, catalog_size, statistics.mean(found), max(found))


class _Trainer:
    """A job of one process with checks every I steps and a save at each of them."""

    def __init__(self, folder: pathlib.Path, interval_steps: int, catalog_size: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.checkpoint = _open(folder, self.model, self.optimizer, catalog_size)
        self.interval_steps, self.catalog_size = interval_steps, catalog_size
        self.step = 0

    def train(self, until: int, ends_corrupt: bool) -> float:
        """Train to a step and return the seconds it took."""
        begin = time.perf_counter()
        while self.step < until:
            self.step += 1
            self.optimizer.zero_grad()
            self.model(torch.ones(16, 512)).square().mean().backward()
            self.optimizer.step()
            if self.step % self.interval_steps == 0:
                recipe = self.step // self.interval_steps % self.catalog_size
                corrupt = ends_corrupt and self.step == until
                self.checkpoint.service.record(self.step, recipe, "sdc" if corrupt else "clean")
                self.checkpoint.save(self.step, _state(self.model, self.optimizer))
        return time.perf_counter() - begin


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def _open(
    place: pathlib.Path | Manager,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    catalog_size: int,
    memory_dir: str | None = None,
) -> GatedCheckpoint:
    config = ScoutConfig.parse({"checkpoint": {"memory_dir": memory_dir}}, "this benchmark")
    exchange = GroupExchange(torch.device("cpu"), timeout_s=60)
    target = TrainingState(model, optimizer)
    return open_checkpoint(place, exchange, Job(catalog_size), config, target, _ignore)


def _ignore(event: str, **fields: Any) -> None:
    return None


def _recover(rank: int, folder: str) -> list[dict[str, Any]]:
    """Corrupt, restore and train up to the same step, for each interval and K."""
    draw = random.Random(0)
    rows = []
    for interval in INTERVALS:
        for size in SIZES:
            trainer = _Trainer(pathlib.Path(folder) / f"{interval}-{size}", interval, size)
            end = draw.randint(2 * size + 1, 3 * size) * interval
            trained_s = trainer.train(end, ends_corrupt=True)
            begin = time.perf_counter()
            trainer.step = trainer.checkpoint.restore("sdc")
            load_s = time.perf_counter() - begin
            back = end - trainer.step
            again_s = trainer.train(end, ends_corrupt=False)
            trainer.checkpoint.close()
            rows.append(
                {
                    "interval_steps": interval,
                    "catalog_size": size,
                    "distance_steps": back,
                    "load_s": load_s,
                    "recovery_s": load_s + again_s,
                    "formula_s": load_s + back * trained_s / end,
                }
            )
    return rows


class _Timed(DcpStorage):
    """DCP that notes how long it took, so that the rest of a save is what the gate adds."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(timeout_s=60)
        self.folder = folder
        self.seconds = 0.0

    def save(self, state_dict: StateDict, folder: pathlib.Path) -> None:
        self.seconds = _seconds(lambda: super(_Timed, self).save(state_dict, folder))


def _label(rank: int, folder: str, memory_dir: str, mebibytes: int) -> dict[str, Any]:
    """Split saves through the gate into DCP's part and the gate's."""
    width = int((mebibytes * 2**20 / 4 / 3 / 4) ** 0.5)  # 4 weights, with two moments each
    layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    storage = _Timed(pathlib.Path(folder))
    checkpoint = _open(storage, model, optimizer, 1000, memory_dir)
    state = _state(model, optimizer)
    bare, added, signing = [], [], []
    for step in range(1, SAVES + 1):
        dist.barrier()
        whole = _seconds(lambda at=step: checkpoint.save(at, state))
        bare.append(storage.seconds)
        added.append(whole - storage.seconds)
        signing.append(_seconds(checkpoint.service.drain))
    checkpoint.close()
    return {
        "state_mib": mebibytes,
        "save_s": statistics.median(bare),
        "added_s": statistics.median(added),
        "least_added_s": min(added),
        "signing_s": statistics.median(signing),
    }


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run() -> dict[str, Any]:
    """Measure everything; times on real processes."""
    distances = [distance(i, k) for i in INTERVALS for k in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        recoveries = run_ranks(1, _recover, folder, timeout_s=400)[0]
    labels = []
    for place in ("memory", "disk"):
        for mebibytes in STATE_MIB:
            with _folder() as folder, _folder("/dev/shm") as memory:
                arguments = (folder, memory if place == "memory" else "", mebibytes)
                row = run_ranks(RANKS, _label, *arguments, timeout_s=400)[0]
                labels.append({"place": place, **row})
    return {"distances": distances, "recoveries": recoveries, "labels": labels}


def _folder(parent: str | None = None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=parent)


def main() -> None:
    """Print the tables."""
    figures = run()
    console = Console()
    table = Table(title=f"Rollback after a corruption ({FAULTS} random faults each), and its time")
    columns = ("I", "K", "mean steps", "I(3K+1)/2", "worst", "2KI")
    for name in (*columns, "one recovery", "load + steps * step"):
        table.add_column(name, justify="right")
    for steps, took in zip(figures["distances"], figures["recoveries"], strict=True):
        table.add_row(
            str(steps.interval_steps),
            str(steps.catalog_size),
            f"{steps.mean:.1f}",
            f"{steps.mean_by_formula:.1f}",
            str(steps.worst),
            str(steps.worst_by_formula),
            f"{took['recovery_s']:.2f} s ({took['distance_steps']} steps)",
            f"{took['formula_s']:.2f} s",
        )
    console.print(table)
    table = Table(title=f"Cost of the labels of one save, {RANKS} ranks")
    for name in ("state", "to", "DCP", "gate", "least", "least / DCP", "signing, in a thread"):
        table.add_column(name, justify="right")
    for row in figures["labels"]:
        table.add_row(
            f"{row['state_mib']} MiB",
            row["place"],
            f"{row['save_s'] * 1e3:.0f} ms",
            f"{row['added_s'] * 1e3:.1f} ms",
            f"{row['least_added_s'] * 1e3:.1f} ms",
            f"{row['least_added_s'] / row['save_s']:.2%}",
            f"{row['signing_s'] * 1e3:.0f} ms",
        )
    console.print(table)


if __name__ == "__main__":
    main()
