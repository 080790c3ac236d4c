"""TorchTitan's own Trainer on CPU: each layout, each fault; and not one bit of training changed."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from integration_tests.torchtitan_assets import make_assets
from integration_tests.torchtitan_cases import (
    FIRST_WRONG_STEP,
    FLOAT32,
    LAYOUTS,
    Layout,
    draw_hang,
    draw_sdc,
    draw_straggler,
)
from integration_tests.torchtitan_harness import Finished, TitanServer, run_stock
from integration_tests.torchtitan_job import Break, Job
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Kind
from scout_core.integration.trust_record import RECORD
from scout_core.lab.faults import FaultAt
from scout_core.report.events import INCIDENTS, RunDir

INSTALLED = importlib.util.find_spec("torchtitan") is not None
pytestmark = [
    pytest.mark.timeout(600),  # three jobs of eight processes on two busy cores
    pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed"),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
JOB_TIMEOUT_S = 200.0
QUIET = "--scout.kappa=1e6"  # corrupting a millisecond's work takes time too: time is not judged
CHECKPOINTS = ("--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2")
SHORT = ("--training.steps=2",)
FSDP4, MOE = LAYOUTS[0], LAYOUTS[-1]
ONE_RANK = replace(FSDP4, ranks=1)


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


def labels(folder: pathlib.Path) -> dict[int, str]:
    """Label of each checkpoint in the trust record, by step."""
    plain = json.loads((folder / "checkpoint" / RECORD).read_text())
    return {entry["step"]: entry["label"] for entry in plain["checkpoints"]}


@each_layout
def test_a_corrupt_and_a_slow_rank_are_named_and_a_restart_ends_as_if_nothing_had_happened(
    layout: Layout, server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    plain = server.run(job(layout, assets, tmp_path / "off", "--scout.no-enable", FLOAT32))
    corrupt = draw_sdc(layout, seed, step=FIRST_WRONG_STEP - 1)
    slow = draw_straggler(layout, seed)
    options = (*CHECKPOINTS, FLOAT32)
    broken = server.run(job(layout, assets, tmp_path, *options, breaks=(corrupt, slow)))
    incidents = broken.ranks[0].incidents
    named = {(incident.kind, *incident.culprit_ranks) for incident in incidents}
    expected = {(Kind.SDC, corrupt.fault.rank), (Kind.STRAGGLER, slow.fault.rank)}
    assert named == expected, (seed, corrupt, slow, incidents)
    assert all(rank.incidents == incidents for rank in broken.ranks)
    assert broken.ranks[0].coverage.startswith(layout.groups)
    assert broken.losses(1, FIRST_WRONG_STEP) == plain.losses(1, FIRST_WRONG_STEP)

    proven = newest_proven(layout, labels(tmp_path))
    seen = next(incident.step for incident in incidents if incident.kind is Kind.SDC)
    assert not (tmp_path / "checkpoint" / f"step-{seen}").exists()
    options += ("--checkpoint.load_only", QUIET)
    options += () if layout.proves else ("--scout.accept_uncertified",)
    again = server.run(job(layout, assets, tmp_path, *options))
    assert f"starts from step {proven}" in again.log(0)
    assert again.losses(1, layout.steps + 1) == plain.losses(proven + 1, layout.steps + 1)
    for before, after in zip(plain.ranks, again.ranks, strict=True):
        assert (after.parameters, after.hooks) == (before.parameters, before.hooks)
        assert (after.incidents, after.not_covered, after.armed) == ([], (), True)
    checks = layout.steps - proven
    counters = {"scout/checks": checks, "scout/armed": 1.0, "scout/incidents": 0.0}
    assert again.ranks[0].metrics == counters


def newest_proven(layout: Layout, record: dict[int, str]) -> int:
    """The step to start from; no checkpoint with the corruption in it has a good label."""
    proven = max(step for step, label in record.items() if label in ("verified", "uncertified"))
    assert record[proven] == ("verified" if layout.proves else "uncertified")
    assert proven < FIRST_WRONG_STEP
    assert {record[step] for step in record if step >= FIRST_WRONG_STEP} <= {"condemned"}
    return proven


@each_layout
def test_the_rank_that_stands_still_is_named_and_not_those_that_wait_for_it(
    layout: Layout, server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    broken = draw_hang(layout, seed)
    limit = "--scout.hang.stall_timeout_s=3"
    stopped = job(layout, assets, tmp_path, QUIET, limit, breaks=(broken,))
    server.attempt(replace(stopped, stop_when=str(tmp_path / "scout" / INCIDENTS)))
    incident = RunDir(tmp_path / "scout").incidents()[0]
    assert incident.kind is Kind.HANG, incident
    assert incident.culprit_ranks == (broken.fault.rank,), (seed, broken, incident)
    assert broken.fault.rank not in incident.victims


def test_a_fault_in_an_expert_of_two_peers_is_detected_and_nobody_is_named(
    server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    broken = in_experts(MOE, seed)
    found = server.run(job(MOE, assets, tmp_path, QUIET, *NINE, breaks=(broken,)))
    incidents = found.ranks[0].incidents
    assert {incident.kind for incident in incidents} == {Kind.SDC}
    assert {incident.status for incident in incidents} == {Status.INCONCLUSIVE}, incidents
    assert any(broken.fault.rank in incident.peer_group for incident in incidents)


def test_a_fault_in_an_expert_of_three_peers_names_its_rank_and_not_its_partner(
    server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    layout = replace(MOE, ranks=6)
    broken = in_experts(layout, seed)
    found = server.run(job(layout, assets, tmp_path, QUIET, *NINE, breaks=(broken,)))
    incidents = found.ranks[0].incidents
    assert {incident.culprit_ranks for incident in incidents} == {(broken.fault.rank,)}, incidents
    assert {incident.kind for incident in incidents} == {Kind.SDC}


NINE = ("--training.steps=9",)


def in_experts(layout: Layout, seed: int) -> Break:
    """A corruption in the experts of one of the MoE layers; the first layer is dense."""
    layer = random.Random(seed).choice(range(1, layout.layers))
    return Break(replace(draw_sdc(layout, seed, step=1).fault, layer=layer), "moe.experts")


VARIANTS = {
    "ddp_with_full_activation_checkpointing": (
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
        "--activation_checkpoint.mode=full",
    ),
    "compiled_blocks_with_selective_checkpointing_and_gradient_accumulation": (
        "--compile.enable",
        "--compile.backend=aot_eager",
        "--activation_checkpoint.mode=selective",
        "--training.global_batch_size=16",
    ),
    "update_in_backward": ("--optimizer.early_step_in_backward",),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_techniques_inside_a_block_change_nothing_and_hide_no_fault(
    variant: str, server: TitanServer, assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    layout = replace(FSDP4, overrides=(*VARIANTS[variant], QUIET))
    steps = ("--training.steps=6",)
    plain = server.run(job(layout, assets, tmp_path / "off", "--scout.no-enable", *steps))
    rank, layer = random.Random(seed).randrange(4), random.Random(seed + 1).randrange(4)
    one_bit = Break(FaultAt("sdc", rank, step=2, layer=layer))
    found = server.run(job(layout, assets, tmp_path / "sdc", *steps, breaks=(one_bit,)))
    healthy = [finished.ranks[0].losses[:2] for finished in (plain, found)]
    assert healthy[0] == healthy[1]
    assert {i.culprit_ranks for i in found.ranks[0].incidents} == {(rank,)}, (seed, one_bit)
    assert found.ranks[0].not_covered == ()


def test_a_killed_job_goes_on_from_its_newest_checkpoint_when_the_catalogue_replays_clean(
    server: TitanServer, assets: list[str], tmp_path: pathlib.Path
) -> None:
    options = (*CHECKPOINTS, "--checkpoint.async_mode=async", QUIET)
    killed = job(FSDP4, assets, tmp_path, *options)
    seen = tmp_path / "checkpoint" / "step-5" / ".metadata"
    server.attempt(replace(killed, stop_when=str(seen)))
    newest = max(labels(tmp_path))
    assert newest >= 3
    again = server.run(job(FSDP4, assets, tmp_path, *options, "--training.steps=7"))
    assert "a replay of the whole catalogue on the newest state was clean" in again.log(0)
    assert f"starts from step {newest}" in again.log(0)
    assert [loss[0] for loss in again.ranks[0].losses] == list(range(newest + 1, 8))
    assert again.ranks[0].incidents == []


@pytest.fixture(scope="module")
def without_scout(
    server: TitanServer, assets: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """A job of one rank whose configuration knows SCOUT and does not switch it on."""
    folder = tmp_path_factory.mktemp("without_scout")
    return server.run(job(ONE_RANK, assets, folder, *CHECKPOINTS, "--scout.no-enable", *SHORT))


def test_without_the_flag_nothing_of_scout_but_the_settings_is_imported(
    without_scout: Finished,
) -> None:
    loaded = without_scout.ranks[0].loaded
    assert [name for name in loaded if name.startswith("scout_torchtitan")] == [
        "scout_torchtitan",
        "scout_torchtitan.job_config",
        "scout_torchtitan.settings",
    ]
    assert not (pathlib.Path(without_scout.job.folder) / "scout").exists()


def test_a_folder_with_nothing_but_scouts_record_still_begins_from_the_initial_weights(
    without_scout: Finished, server: TitanServer, assets: list[str], tmp_path: pathlib.Path
) -> None:
    weights = pathlib.Path(without_scout.job.folder) / "checkpoint" / "step-1"
    initial = ("--checkpoint.enable", f"--checkpoint.initial_load_path={weights}")
    record = tmp_path / "checkpoint" / RECORD
    killed = job(ONE_RANK, assets, tmp_path, *initial, "--training.steps=100000")
    server.attempt(replace(killed, stop_when=str(record)))
    assert {path.name for path in record.parent.iterdir()} <= {RECORD, ".scout_trust.lock"}
    again = server.run(job(ONE_RANK, assets, tmp_path, *initial, *SHORT))
    assert again.log(0).count(f"Loading the checkpoint from {weights}") == 2
    assert [step for step, _, _ in again.ranks[0].losses] == [1, 2]


def test_the_stock_entry_with_only_the_flag_names_a_corrupt_rank(
    assets: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    rank, layer = random.Random(seed).randrange(4), random.Random(seed + 1).randrange(4)
    broken = Break(FaultAt("sdc", rank, step=1, layer=layer))
    options = (
        "--training.steps=6",
        "--experimental.custom_import=integration_tests.torchtitan_stock",
    )
    argv = job(FSDP4, assets, tmp_path, QUIET, *options).argv
    printed = run_stock(4, argv, tmp_path, broken)
    assert f"scout: torchtitan, {FSDP4.groups}; 5 recipes in a cycle of 4 steps" in printed
    assert "scout: 6 checks in 6 steps, 1 incident(s)" in printed, printed[-3000:]
    (incident,) = RunDir(tmp_path / "scout").incidents()
    assert (incident.kind, incident.culprit_ranks) == (Kind.SDC, (rank,)), (seed, incident)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("--scout.interval_steps=0", "interval_steps=0 in the TOML table [scout]"),
        ("--scout.layers=blocks", "layers='blocks' matches no module"),
        ("--fault_tolerance.enable", "fault_tolerance.enable = true: torchft changes"),
        ("--scout.nonsense=1", "--scout.nonsense"),
    ],
)
def test_a_wrong_configuration_is_an_error_before_training_starts(
    wrong: str, named: str, server: TitanServer, assets: list[str], tmp_path: pathlib.Path
) -> None:
    outcome = server.attempt(job(ONE_RANK, assets, tmp_path, wrong))
    log = (tmp_path / "rank-0.log").read_text()
    assert outcome.codes != [0]
    assert named in log
    assert "Training starts" not in log
