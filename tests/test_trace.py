"""A fault inside a tensor-parallel layer names its rank, although its partner is wrong too."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from scout_core.config import ScoutConfig
from scout_core.evidence.exchange import GroupExchange
from scout_core.integration.models import Patterns
from scout_core.integration.pytorch import PyTorch
from scout_core.integration.session import Session
from scout_core.lab.drill import train_step
from scout_core.lab.faults import FaultAt, Surface
from scout_core.lab.injection import Target, inject
from scout_core.lab.model import GPT, GPTConfig, Text
from scout_core.lab.parallel import Parallelism, parallelise
from scout_core.report.events import RunDir
from scout_core.testing import run_ranks

RANKS = 8  # 2 replicas x 2 shards x 2 tensor-parallel positions
MODEL = GPTConfig(layers=2, width=24, heads=4, context=8)
PARTS = ("attention.query", "attention.value", "attention.out", "up", "down")


def train_with_a_fault_in_a_part(
    rank: int, faulty: int, part: str, surface: Surface, folder: str
) -> list[tuple[tuple[int, ...], str]]:
    torch.manual_seed(0)
    inner = GPT(MODEL)
    layers = list(inner.layers)
    model, mesh = parallelise(inner, Parallelism.HSDP_TP, RANKS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = ScoutConfig(interval_steps=1, confirm_repeats=1, timing_repeats=2, on_error="raise")
    framework = PyTorch(model, optimizer, mesh, Patterns())
    exchange = GroupExchange(torch.device("cpu"), 20.0)
    text = Text(MODEL.context, 1 << 12)
    with Session(framework, config, exchange, RunDir(folder), lambda line: None) as session:
        for step in range(3):
            if step == 1 and rank == faulty:
                target = Target([layers[0].get_submodule(part)], optimizer)
                inject(FaultAt("sdc", rank, step, surface=surface), target)
            train_step(model, optimizer, text.batch(0, rank // 2, step, 2))
        told = session.incidents()
    dist.barrier()
    return [(i.culprit_ranks, str(i.evidence["what"])) for i in told]


def test_only_the_rank_that_computed_the_first_wrong_value_is_named(tmp_path: object) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    faulty, part = rng.randrange(RANKS), rng.choice(PARTS)
    surface = rng.choice([Surface.OUTPUT, Surface.GRADIENT])
    found = run_ranks(
        RANKS, train_with_a_fault_in_a_part, faulty, part, surface, str(tmp_path), timeout_s=50
    )
    named = [(ranks, part in what) for ranks, what in found[0] if ranks]
    assert named == [((faulty,), True)], (seed, surface, faulty, part, found[0])
