"""Each framework's own experts: a fault at one row count is named with it, within one cycle."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import random
from dataclasses import replace

import pytest
import torch

from integration_tests import deepspeed_cases, moe_frameworks
from integration_tests.deepspeed_cases import PRELOADED, SCOUT, Options
from integration_tests.moe_frameworks import deepspeed_in_turn, draw_fault, shape_named
from scout_core.decision.incident import Incident, Kind
from scout_core.decision.topology import Coordinate, Topology
from scout_core.evidence.environment import TORCH_KERNEL, TORCH_SETTINGS
from scout_core.integration.expert_calls import ExpertKernels
from scout_core.lab.faults import FaultAt
from scout_core.testing import preload, run_ranks

pytestmark = pytest.mark.timeout(500)
preload(PRELOADED)
ROWS = (8, 16, 24, 32)
VERSION = f"torch {torch.__version__}"


def needs(framework: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed")


def drawn() -> random.Random:
    """A generator whose seed is shown when the test fails."""
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    return random.Random(seed)


def expert_layout(ranks: int, axis: str) -> Topology:
    """Two expert positions, next to each other, of as many replicas as there are."""
    places = [Coordinate(**{axis: rank // 2}, e=rank % 2) for rank in range(ranks)]
    return Topology.from_coordinates([Coordinate(d=rank) for rank in range(ranks)], places)


def each_rank_in_turn(draw: random.Random, ranks: int, step: int) -> list[tuple[FaultAt, ...]]:
    """Faults of as many runs as it takes, one of each of the two groups of expert replicas a run.

    The two do not exchange tokens with each other: of two such at once nobody can be named.
    """
    pairs = draw.sample(range(ranks // 2), ranks // 2)
    others = pairs[1:] + pairs[:1]
    runs = [(2 * pair, 2 * other + 1) for pair, other in zip(pairs, others, strict=True)]
    return [tuple(draw_fault(draw, r, draw.choice(ROWS), step) for r in faulty) for faulty in runs]


def assert_named(faults: tuple[FaultAt, ...], incidents: list[Incident]) -> None:
    """Each fault was named with its rows, and nobody else was named."""
    assert [f for f in faults if not shape_named(f, incidents)] == []
    slow = Kind.GROUP_SLOWDOWN  # of a busy machine
    assert {i.kind for i in incidents} - {slow} == {Kind.SDC}
    assert {r for i in incidents for r in i.culprit_ranks} == {f.rank for f in faults}


@needs("deepspeed")
def test_deepspeeds_experts_on_each_rank_in_turn(tmp_path: pathlib.Path) -> None:
    draw = drawn()
    layout = replace(deepspeed_cases.LAYOUTS["moe"], ranks=6)
    kernels = ExpertKernels(
        TORCH_KERNEL, VERSION, TORCH_SETTINGS, "bfloat16", 24, 48, num_experts=2, row_alignment=2
    )
    topology = expert_layout(layout.ranks, "d")
    path = moe_frameworks.write(tmp_path / "experts.json", kernels, topology, ROWS)
    scout = {**SCOUT, "kappa": 1e6, "experts": {"catalogue": path}}
    options = Options(scout, seed=draw.randrange(1 << 16), run_dir=str(tmp_path))
    faulty = draw.sample(range(layout.ranks), layout.ranks)
    faults = [draw_fault(draw, rank, draw.choice(ROWS)) for rank in faulty]
    for healthy, found, line in run_ranks(
        layout.ranks, deepspeed_in_turn, layout, options, faults, len(ROWS), timeout_s=450
    ):
        assert "4 representatives of 4 shapes" in line
        assert [i for i in healthy if i.kind is not Kind.GROUP_SLOWDOWN] == []
        for fault, incidents in zip(faults, found, strict=True):
            assert_named((fault,), incidents)


@needs("torchtitan")
def test_torchtitans_experts_on_each_rank_in_turn(tmp_path: pathlib.Path) -> None:
    from integration_tests.test_torchtitan import MOE, QUIET, job
    from integration_tests.torchtitan_assets import make_assets
    from integration_tests.torchtitan_harness import TitanServer
    from integration_tests.torchtitan_job import Break

    draw = drawn()
    layout = replace(MOE, ranks=6)
    kernels = ExpertKernels(
        TORCH_KERNEL, VERSION, TORCH_SETTINGS, "bfloat16", 64, 64, num_experts=4, row_alignment=8
    )
    topology = expert_layout(6, "s")
    path = moe_frameworks.write(tmp_path / "experts.json", kernels, topology, ROWS)
    more = (QUIET, f"--scout.experts.catalogue={path}", f"--training.steps={3 + len(ROWS)}")
    with TitanServer() as server:
        assets = make_assets(tmp_path / "assets")
        for number, faults in enumerate(each_rank_in_turn(draw, 6, step=1)):
            breaks = tuple(Break(fault) for fault in faults)
            folder = tmp_path / str(number)
            broken = server.run(job(layout, assets, folder, *more, breaks=breaks))
            assert "4 representatives of 4 shapes" in broken.ranks[0].coverage
            assert_named(faults, broken.ranks[0].incidents)


@needs("megatron")
def test_megatrons_experts_on_each_rank_in_turn(tmp_path: pathlib.Path) -> None:
    from integration_tests.megatron_cases import LAYOUTS, QUIET, Job
    from integration_tests.megatron_harness import MegatronServer

    draw = drawn()
    layout = LAYOUTS["moe_ep2"]
    version = importlib.metadata.version("megatron-core")
    settings = "plain gelu, bias False"
    kernels = ExpertKernels(
        "megatron SequentialMLP", version, settings, "float32", 32, 64, num_experts=2
    )
    topology = expert_layout(layout.ranks, "d")
    path = moe_frameworks.write(tmp_path / "experts.json", kernels, topology, ROWS)
    scout = {**QUIET, "experts": {"catalogue": path}}
    steps = 2 + len(ROWS)
    with MegatronServer() as server:
        for number, faults in enumerate(each_rank_in_turn(draw, layout.ranks, step=1)):
            folder = str(tmp_path / str(number))
            job = Job(layout, folder, scout, steps, draw.randrange(1 << 16), faults)
            seen = server.run(job).ranks[0]
            assert not any("replayed itself" in gap for gap in seen.not_covered)
            expert_recipes = [r for r in seen.recipes if r.startswith("expert:")]
            assert len(expert_recipes) == 1 + len(ROWS)
            assert_named(faults, seen.incidents)
