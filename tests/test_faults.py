"""Faults are data; each acts where it says, as often as it says, and can be taken away."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scout_core.cli.drill import make_plan
from scout_core.errors import ScoutError
from scout_core.lab.drill import DrillPlan, RankResult, draw_fault, judge
from scout_core.lab.faults import (
    Corruption,
    FaultAt,
    Magnitude,
    Persistence,
    Surface,
    flip_bit,
    parse_fault,
)
from scout_core.lab.injection import Target, inject
from scout_core.lab.model import GPT, GPTConfig, Text, loss_of
from scout_core.lab.parallel import Parallelism

SMALL = GPTConfig(layers=2, width=8, heads=2, context=6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("magnitude", list(Magnitude))
def test_every_magnitude_changes_the_element(dtype: torch.dtype, magnitude: Magnitude) -> None:
    element = torch.tensor([1.5], dtype=dtype)
    flip_bit(element, magnitude)
    value = float(element)
    assert value != 1.5
    assert math.isnan(value) is (magnitude is Magnitude.NAN)
    if magnitude is Magnitude.SIGN:
        assert value == -1.5
    if magnitude is Magnitude.LOW_BIT:
        assert abs(value - 1.5) <= torch.finfo(dtype).eps


@given(st.sampled_from(list(Persistence)), st.integers(0, 1000))
def test_persistence_says_how_often_a_fault_acts(persistence: Persistence, seed: int) -> None:
    corrupt = Corruption(FaultAt("sdc", 0, 0, persistence=persistence, seed=seed))
    acted = 0
    for _ in range(40):
        tensor = torch.ones(5)
        corrupt(tensor)
        changed = int((tensor != 1).sum())
        assert changed <= 1
        acted += changed
    expected = {
        Persistence.PERSISTENT: range(40, 41),
        Persistence.ONE_SHOT: range(1, 2),
        Persistence.INTERMITTENT: range(1, 40),
    }
    assert acted in expected[persistence]


def trained(fault: FaultAt | None, steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fault is not None:
        inject(fault, Target(list(model.layers), optimizer))
    text = Text(SMALL.context)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *text.batch(0, 0, step, 2)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "surface", [Surface.PARAMETER, Surface.OUTPUT, Surface.GRADIENT, Surface.OPTIMIZER]
)
def test_each_surface_changes_training(surface: Surface) -> None:
    seed = random.SystemRandom().randrange(1000)
    print(f"seed {seed}")
    fault = FaultAt("sdc", 0, 0, layer=1, surface=surface, magnitude=Magnitude.SIGN, seed=seed)
    same = [torch.equal(a, b) for a, b in zip(trained(None, 1), trained(fault, 1), strict=True)]
    assert not all(same)


@pytest.mark.parametrize("kind", ["sdc", "gradient", "straggler"])
def test_a_fault_can_be_taken_away(kind: str) -> None:
    model = GPT(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1, 4, SMALL.width)
    before = model.layers[0](x)
    undo = inject(
        FaultAt(kind, 0, 0, magnitude=Magnitude.SIGN), Target(list(model.layers), optimizer)
    )
    undo()
    assert torch.equal(model.layers[0](x), before)
    assert "forward" not in vars(model.layers[0])


def test_a_faulty_optimizer_gets_its_class_back() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    fault = FaultAt("sdc", 0, 0, surface=Surface.OPTIMIZER, magnitude=Magnitude.SIGN)
    undo = inject(fault, Target([nn.Linear(1, 1)], optimizer))
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert int((parameter.detach() == -1).sum()) == 1
    undo()
    assert type(optimizer) is torch.optim.SGD


def test_a_layer_that_does_not_exist_is_refused() -> None:
    target = Target([nn.Linear(1, 1)], torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(ScoutError, match=r"layers 0\.\.0"):
        inject(FaultAt("sdc", 0, 0, layer=3), target)


def test_a_fault_is_read_from_text() -> None:
    kind, fields = parse_fault("sdc:rank=2,surface=gradient,magnitude=nan,percent=7.5")
    assert kind == "sdc"
    assert fields == {
        "rank": 2,
        "surface": Surface.GRADIENT,
        "magnitude": Magnitude.NAN,
        "percent": 7.5,
    }


@pytest.mark.parametrize(
    "text", ["melt", "sdc:rank=x", "sdc:colour=red", "sdc:surface=moon", "sdc:rank"]
)
def test_a_fault_that_cannot_be_read_is_a_clear_error(text: str) -> None:
    with pytest.raises(ScoutError, match="--fault"):
        parse_fault(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("mesh", 4, [], 0, None, 2), "--parallelism 'mesh'"),
        (("hsdp", 5, [], 0, None, 2), "--ranks 5"),
        (("ddp", 0, [], 0, None, 2), "--ranks 0"),
        (("ddp", 4, ["sdc:rank=4"], 0, None, 2), "rank=4"),
        (("ddp", 4, ["sdc:layer=9"], 0, None, 2), "layer=9"),
        (("ddp", 2, ["sdc", "sdc", "sdc"], 0, None, 2), "3 faults"),
        (("ddp", 4, [], 0, None, 0), "--interval 0"),
        (("ddp", 4, [], 0, 0, 2), "--steps 0"),
    ],
)
def test_bad_options_of_a_drill_are_clear_errors(
    options: tuple[str, int, list[str], int, int | None, int], words: str
) -> None:
    with pytest.raises(ScoutError, match=words):
        make_plan(*options)


@given(st.integers(0, 10_000))
def test_drawn_faults_fit_the_job_and_keep_what_is_fixed(seed: int) -> None:
    fault = draw_fault("sdc", 4, 3, seed, rank=2)
    assert fault.rank == 2
    assert 0 <= fault.layer < 3
    assert fault == draw_fault("sdc", 4, 3, seed, rank=2)


def test_a_fault_that_nobody_reports_is_missed() -> None:
    plan = DrillPlan(Parallelism.DDP, 4, (FaultAt("sdc", 1, 2),), steps=4)
    outcome = judge(plan, RankResult([], "", [1.0], [], [], 6))
    assert len(outcome.missed) == 1
    assert not outcome.passed
