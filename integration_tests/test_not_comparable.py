"""Ranks that did other work, and modules that cannot be compared, are never called sdc."""

from __future__ import annotations

import pathlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from integration_tests.jobs import mean_square
from scout_core import Incident, enable_resiliency
from scout_core.decision.incident import Kind
from scout_core.report.events import RunDir
from scout_core.testing import run_ranks

WIDTH = 8
SCOUT = {"interval_steps": 1, "on_error": "raise", "exchange_timeout_s": 20}


class Opaque:
    """An argument type that SCOUT has never seen."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Dice(Layer):
    """Its output depends on something that SCOUT cannot restore."""

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out + random.SystemRandom().random() * 1e-3


class Net(nn.Module):
    def __init__(self, layer: type[Layer] = Layer, embedded: bool = True) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Embedding(16, WIDTH) if embedded else nn.Identity()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.skip: int | None = None
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                x = layer(x, extra=self.extra)
        return x


@dataclass(frozen=True)
class Seen:
    incidents: list[Incident]
    not_covered: tuple[str, ...]
    remarks: list[str]
    checks: int
    entered: int


def run(rank: int, case: str, odd: int, run_dir: str) -> Seen:
    torch.manual_seed(3)
    net = Net(Dice if case == "dice" else Layer, embedded=case != "no embedding")
    if case == "seeds":
        torch.manual_seed(rank)
        for parameter in net.layers[1].parameters():
            nn.init.normal_(parameter)
    net.extra = Opaque() if case == "opaque" else None
    net.skip = 1 if case == "skip" and rank == odd else None
    model: nn.Module = net if case == "seeds" else _ddp(net)
    if case == "compiled before":
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = enable_resiliency(model, optimizer, SCOUT, run_dir=run_dir)
    for step in range(6):
        length = 5 + rank if case == "lengths" else 5
        mean_square(model(_inputs(case, step, rank, length))).backward()
        if case == "evaluation":
            with torch.no_grad():
                model(_inputs(case, step, rank, 3))
        optimizer.step()
        optimizer.zero_grad()
    found = session.incidents()
    coverage = session.coverage()
    session.close()
    dist.barrier()
    events = RunDir(run_dir).events()
    remarks = [event["text"] for event in events if event["event"] == "remark"]
    return Seen(found, coverage.not_covered, remarks, session.check_count, len(session.qualified))


def _ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, find_unused_parameters=True)


def _inputs(case: str, step: int, rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    if case == "no embedding":
        return torch.randn(2, length, WIDTH, generator=generator)
    return torch.randint(16, (2, length), generator=generator)


def on_four(case: str, tmp_path: pathlib.Path, odd: int = 2) -> Seen:
    results: list[Seen] = run_ranks(4, run, case, odd, str(tmp_path), timeout_s=50)
    assert all(each.incidents == results[0].incidents for each in results)
    assert all(incident.kind is not Kind.SDC for incident in results[0].incidents)
    return results[0]


def test_a_model_without_embedding_and_head_says_so_and_replays_the_rest(
    tmp_path: pathlib.Path,
) -> None:
    seen = on_four("no embedding", tmp_path)
    assert seen.incidents == []
    assert any("no embedding found" in line for line in seen.not_covered)
    assert any("no head found" in line for line in seen.not_covered)
    assert seen.entered >= 2  # hidden layers and the optimizer


def test_other_sequence_lengths_per_rank_replay_the_sources_and_are_remarked(
    tmp_path: pathlib.Path,
) -> None:
    seen = on_four("lengths", tmp_path)
    assert seen.incidents == []
    assert any("input shapes differ" in remark for remark in seen.remarks)
    assert seen.entered >= 3


@pytest.mark.parametrize("seed", [1, 2])
def test_a_rank_that_skips_a_layer_is_named_as_not_comparable(
    seed: int, tmp_path: pathlib.Path
) -> None:
    odd = random.Random(seed).randrange(4)
    seen = on_four("skip", tmp_path, odd)
    assert [(i.kind, i.reason, i.culprit_ranks) for i in seen.incidents] == [
        (Kind.NOT_COMPARABLE, "WORK_SKIPPED", (odd,))
    ]
    assert "layers.1" in seen.incidents[0].message


def test_an_evaluation_between_backward_and_step_keeps_the_capture(
    tmp_path: pathlib.Path,
) -> None:
    seen = on_four("evaluation", tmp_path)
    assert seen.incidents == []
    assert seen.not_covered == tuple(line for line in seen.not_covered if "head" in line)
    assert seen.entered >= 3


def test_an_argument_of_unknown_type_is_not_covered(tmp_path: pathlib.Path) -> None:
    seen = on_four("opaque", tmp_path)
    assert seen.incidents == []
    assert any("type Opaque" in line for line in seen.not_covered)


def test_a_layer_that_is_not_deterministic_is_not_covered(tmp_path: pathlib.Path) -> None:
    seen = on_four("dice", tmp_path)
    assert seen.incidents == []
    assert any("not bitwise reproducible" in line for line in seen.not_covered)


def test_a_model_compiled_before_enabling_is_not_covered(tmp_path: pathlib.Path) -> None:
    seen = on_four("compiled before", tmp_path)
    assert seen.incidents == []
    assert any("was not called" in line for line in seen.not_covered)


def test_replicas_that_never_were_equal_are_configuration_not_hardware(
    tmp_path: pathlib.Path,
) -> None:
    seen = on_four("seeds", tmp_path)
    assert {(i.kind, i.reason) for i in seen.incidents} == {
        (Kind.NOT_COMPARABLE, "STATE_DIFFERS_AT_START")
    }
    assert all(incident.culprits == () for incident in seen.incidents)
