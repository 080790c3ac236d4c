"""TorchTitan's own Trainer on CPU: each layout, each fault; and not one bit of training changed."""

from __future__ import annotations

import importlib.util
import pathlib
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from integration_tests.torchtitan_assets import make_assets
from integration_tests.torchtitan_cases import LAYOUTS, Layout, draw_sdc, draw_straggler
from integration_tests.torchtitan_harness import Finished, TitanServer
from integration_tests.torchtitan_job import Break, Job
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Kind
from scout_core.lab.faults import FaultAt

INSTALLED = importlib.util.find_spec("torchtitan") is not None
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed"),
]
QUIET = "--scout.kappa=1e6"  # corrupting a millisecond's work takes time too: time is not judged
FSDP4 = LAYOUTS[0]
MOE = LAYOUTS[-1]
JOB_TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def server() -> Iterator[TitanServer]:
    with TitanServer() as running:
        yield running


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 20)
    print(f"seed {drawn}")
    return drawn


def job(
    layout: Layout,
    assets: list[str],
    folder: pathlib.Path,
    *more: str,
    breaks: tuple[Break, ...] = (),
) -> Job:
    """A job that checks every step and leaves everything below `folder`."""
    options = (f"--job.dump_folder={folder}", f"--scout.run_dir={folder / 'scout'}")
    argv = layout.arguments(*assets, *options, "--scout.interval_steps=1", *more)
    return Job(layout.ranks, argv, str(folder), breaks, JOB_TIMEOUT_S)


def bits(finished: Finished) -> list[object]:
    """Loss and gradient norm of every step, and the final parameters, of each rank."""
    return [(rank.losses, rank.parameters) for rank in finished.ranks]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_loss_gradient_norm_and_parameters_are_the_same_bits_with_and_without_scout(
    layout: Layout, server: TitanServer, assets: list[str], tmp_path: pathlib.Path
) -> None:
    layout = replace(layout, steps=4)
    plain = server.run(job(layout, assets, tmp_path / "off", "--scout.no-enable"))
    checked = server.run(job(layout, assets, tmp_path / "on"))
    rank = checked.ranks[0]
    assert bits(checked) == bits(plain)
    assert len(plain.ranks[0].losses) == layout.steps
    assert rank.coverage.startswith(layout.groups)
    assert (rank.not_covered, rank.incidents) == ((), [])
    assert (rank.checks, rank.armed) == (layout.steps, True)
    assert [r.hooks for r in checked.ranks] == [r.hooks for r in plain.ranks]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_corrupt_and_a_slow_rank_are_each_named_and_nobody_else(
    layout: Layout, server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    corrupt, slow = draw_sdc(layout, seed), draw_straggler(layout, seed)
    found = server.run(job(layout, assets, tmp_path, breaks=(corrupt, slow)))
    incidents = found.ranks[0].incidents
    named = {(incident.kind, *incident.culprit_ranks) for incident in incidents}
    expected = {(Kind.SDC, corrupt.fault.rank), (Kind.STRAGGLER, slow.fault.rank)}
    assert named == expected, (seed, corrupt, slow, incidents)
    assert all(rank.incidents == incidents for rank in found.ranks)


def test_a_fault_in_an_expert_of_two_peers_is_detected_and_nobody_is_named(
    server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    fault = replace(draw_sdc(MOE, seed).fault, layer=random.Random(seed).choice([1, 2]))
    broken = Break(fault, "moe.experts")
    found = server.run(job(replace(MOE, steps=9), assets, tmp_path, QUIET, breaks=(broken,)))
    incidents = found.ranks[0].incidents
    assert {incident.kind for incident in incidents} == {Kind.SDC}
    assert {incident.status for incident in incidents} == {Status.INCONCLUSIVE}, incidents
    assert any(fault.rank in incident.peer_group for incident in incidents)


def test_a_fault_in_an_expert_of_three_peers_names_its_rank_and_not_its_partner(
    server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    layout = replace(MOE, ranks=6, steps=9)
    rng = random.Random(seed)
    fault = replace(draw_sdc(layout, seed).fault, layer=rng.choice([1, 2]))
    broken = Break(fault, "moe.experts")
    found = server.run(job(layout, assets, tmp_path, QUIET, breaks=(broken,)))
    incidents = found.ranks[0].incidents
    assert {incident.culprit_ranks for incident in incidents} == {(fault.rank,)}, incidents
    assert {incident.kind for incident in incidents} == {Kind.SDC}


VARIANTS = {
    "full_activation_checkpointing": ("--activation_checkpoint.mode=full",),
    "selective_activation_checkpointing": ("--activation_checkpoint.mode=selective",),
    "compiled_blocks": ("--compile.enable", "--compile.backend=aot_eager"),
    "gradient_accumulation": ("--training.global_batch_size=16",),
    "update_in_backward": ("--optimizer.early_step_in_backward",),
    "ddp": (
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_techniques_of_a_block_change_nothing_and_hide_no_fault(
    variant: str, server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    layout = replace(FSDP4, steps=4, overrides=VARIANTS[variant])
    plain = server.run(job(layout, assets, tmp_path / "off", "--scout.no-enable"))
    checked = server.run(job(layout, assets, tmp_path / "on"))
    assert bits(checked) == bits(plain)
    assert checked.ranks[0].incidents == []
    assert checked.ranks[0].not_covered == ()
    rank = random.Random(seed).randrange(4)
    broken = Break(FaultAt("sdc", rank, step=1, layer=random.Random(seed + 1).randrange(4)))
    layout = replace(layout, steps=6)
    found = server.run(job(layout, assets, tmp_path / "sdc", QUIET, breaks=(broken,)))
    assert {i.culprit_ranks for i in found.ranks[0].incidents} == {(rank,)}, (seed, broken)


def test_without_the_flag_scout_is_not_even_imported(
    server: TitanServer, assets: list[str], tmp_path: pathlib.Path
) -> None:
    layout = replace(FSDP4, ranks=1, steps=2)
    off = server.run(job(layout, assets, tmp_path, "--scout.no-enable")).ranks[0]
    assert [name for name in off.loaded if name.startswith("scout_torchtitan")] == [
        "scout_torchtitan",
        "scout_torchtitan.job_config",
        "scout_torchtitan.settings",
    ]
    assert not (tmp_path / "scout").exists()
