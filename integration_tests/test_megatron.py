"""Megatron: every layout, every fault, the right rank; and not one bit of training changed."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from integration_tests.megatron_cases import (
    LAYOUTS,
    MODES,
    MOE_MODES,
    QUIET,
    SCOUT,
    Job,
    Layout,
    PretrainJob,
)
from integration_tests.megatron_harness import (
    CONFIGS,
    CPU,
    UNPACKED,
    Finished,
    MegatronServer,
    arguments_of,
    cpu_environment,
    log_of,
)
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Incident, Kind
from scout_core.decision.labels import Label
from scout_core.lab.faults import FaultAt, Magnitude, Surface
from scout_core.report.events import RunDir

IN_CI = bool(os.environ.get("CI"))
INSTALLED, NEXT = "installed", "0.18.2"
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None and not IN_CI,
        reason="megatron-core is not installed",
    ),
]
needs_next = pytest.mark.skipif(
    not UNPACKED.exists() and not IN_CI,
    reason="megatron-core 0.18.2 is not unpacked: make megatron-next",
)
WIDE = 96  # timed replays must be longer than what starting them takes
HEALED = 10  # step: the slow rank is well again, and has been named
PROVEN_BY = (10, 11)  # steps: two cycles of all recipes have passed, and a save between them
SAVE_INTERVAL, LAST_SAVE = 4, 16
NOT_TAKEN = {Label.CONDEMNED.value, Label.REFUSED.value}
WATCHED = {**QUIET, "hang": {"stall_timeout_s": 3.0}}
SURE = [Magnitude.MID_BIT, Magnitude.EXPONENT, Magnitude.SIGN]
CORE = ("dp4", "dp4_tp2_sp", "dp4_pp2", "moe_ep2_tp2")
ON_BOTH = [(INSTALLED, name) for name in LAYOUTS] + [(NEXT, name) for name in CORE]


class Servers:
    """One fork server per version, started when it is first used."""

    def __init__(self) -> None:
        self._running: dict[str, MegatronServer] = {}

    def __getitem__(self, version: str) -> MegatronServer:
        if version == NEXT and not UNPACKED.exists() and not IN_CI:
            pytest.skip("megatron-core 0.18.2 is not unpacked: make megatron-next")
        if version not in self._running:
            server = MegatronServer(UNPACKED if version == NEXT else None)
            self._running[version] = server.__enter__()
        return self._running[version]

    def close(self) -> None:
        """End all servers."""
        for server in self._running.values():
            server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


@pytest.fixture
def draw() -> random.Random:
    """A generator whose seed is shown when the test fails."""
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    return random.Random(seed)


def named(incidents: Sequence[Incident], kind: Kind) -> set[int]:
    """Ranks that incidents of a kind blame."""
    return {rank for i in incidents if i.kind is kind for rank in i.culprit_ranks}


def a_fault(draw: random.Random, layout: Layout, **fixed: Any) -> FaultAt:
    drawn: dict[str, Any] = {
        "kind": draw.choice(["sdc", "gradient"]),
        "rank": draw.randrange(layout.ranks),
        "step": draw.randrange(2),
        "layer": draw.randrange(layout.layers_of_rank),
        "magnitude": draw.choice(SURE),
        "seed": draw.randrange(1 << 16),
    }
    return FaultAt(**{**drawn, **fixed})


def assert_unchanged(off: Finished, on: Finished) -> None:
    """Training was the same, bit by bit, and everything that can be replayed was."""
    for without, with_scout in zip(off.ranks, on.ranks, strict=True):
        assert with_scout.losses == without.losses
        assert with_scout.norms == without.norms
        assert with_scout.parameters == without.parameters
        assert with_scout.masters == without.masters
        assert with_scout.main_grads == without.main_grads
        assert with_scout.log == without.log
        assert with_scout.incidents == []
        assert with_scout.armed
        assert with_scout.qualified == set(with_scout.recipes)
        assert with_scout.checks == with_scout.steps


@pytest.mark.parametrize(("version", "name"), ON_BOTH)
def test_no_bit_of_training_changes_until_a_rank_stands_still_and_is_named(
    servers: Servers, version: str, name: str, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS[name]
    fault = a_fault(draw, layout, kind="hang", step=draw.randint(4, 6))
    off = servers[version].run(Job(layout, f"{tmp_path}/off", steps=fault.step))
    on = servers[version].run_until_hang(Job(layout, f"{tmp_path}/on", WATCHED, 9, faults=(fault,)))
    assert_unchanged(off, on)
    groups = {ranks for kind, ranks in on.ranks[0].groups if kind == "dense"}
    experts = {ranks for kind, ranks in on.ranks[0].groups if kind == "expert"}
    assert groups == set(layout.groups)
    assert experts == set(layout.expert_groups)
    (incident,) = RunDir(f"{tmp_path}/on/scout").incidents()
    assert incident.kind is Kind.HANG
    assert incident.culprit_ranks == (fault.rank,)
    assert "stand_still" in incident.culprits[0].where


@pytest.mark.parametrize("mode", [*MODES, *MOE_MODES])
def test_how_a_layer_is_run_changes_nothing_either(
    servers: Servers, mode: str, tmp_path: pathlib.Path
) -> None:
    plain = LAYOUTS["moe_ep2" if mode in MOE_MODES else "bf16"]
    layout = replace(plain, config={**MODES, **MOE_MODES}[mode])
    off = servers[INSTALLED].run(Job(layout, f"{tmp_path}/off"))
    on = servers[INSTALLED].run(Job(layout, f"{tmp_path}/on", QUIET))
    assert_unchanged(off, on)


@pytest.mark.parametrize(("version", "name"), ON_BOTH)
def test_a_slow_and_later_a_wrong_rank_are_named_and_the_gate_goes_back_to_before_that(
    servers: Servers, version: str, name: str, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS[name]
    slow = a_fault(draw, layout, kind="straggler", step=1, percent=300.0)
    wrong = a_fault(draw, layout, step=draw.randint(*PROVEN_BY))
    job = Job(
        *(layout, str(tmp_path), {**SCOUT, "timing_repeats": 4}),
        steps=LAST_SAVE,
        faults=(slow, wrong),
        healed_at=HEALED,
        save_interval=SAVE_INTERVAL,
        width=WIDE,
    )
    for result in servers[version].run(job).ranks:
        early = [i for i in result.incidents if i.step < HEALED]
        assert named(early, Kind.STRAGGLER) == {slow.rank}
        corrupt = [i for i in result.incidents if i.kind is Kind.SDC]
        assert named(corrupt, Kind.SDC) == {wrong.rank}
        assert {i.status for i in corrupt} == {Status.ATTRIBUTED}
        assert {i.peer_group for i in corrupt} == {layout.peers_of(wrong.rank)}
        assert result.saved[SAVE_INTERVAL] not in NOT_TAKEN
        assert result.saved[LAST_SAVE] in NOT_TAKEN
        assert 0 < result.went_back_to <= wrong.step
        assert result.is_restored


@pytest.mark.parametrize("name", ["moe_ep2", "moe_ep2_tp2"])
def test_experts_that_compute_wrongly_are_named_among_their_replicas(
    servers: Servers, name: str, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS[name]
    fault = a_fault(draw, layout, kind="sdc", step=0)
    job = Job(layout, str(tmp_path), QUIET, 6, faults=(fault,), inside="mlp.experts")
    incidents = servers[INSTALLED].run(job).ranks[0].incidents
    assert named(incidents, Kind.SDC) == {fault.rank}
    experts = [i for i in incidents if "experts" in i.culprits[0].module]
    assert {incident.peer_group for incident in experts} <= {layout.expert_peers_of(fault.rank)}


PARTS = ("self_attention", "self_attention.core_attention", "self_attention.linear_proj", "mlp")


def test_a_wrong_part_of_a_tensor_parallel_layer_makes_nobody_else_a_culprit(
    servers: Servers, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS["dp4_tp2_sp"]
    fault, inside = a_fault(draw, layout), draw.choice(PARTS)
    job = Job(layout, str(tmp_path), QUIET, fault.step + 5, faults=(fault,), inside=inside)
    assert named(servers[INSTALLED].run(job).ranks[0].incidents, Kind.SDC) == {fault.rank}


@pytest.mark.parametrize("name", ["bf16", "dist_opt", "instances"])
def test_a_wrong_weight_at_rest_is_named(
    servers: Servers, name: str, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS[name]
    fault = a_fault(draw, layout, kind="sdc", step=2, surface=Surface.PARAMETER)
    result = servers[INSTALLED].run(Job(layout, str(tmp_path), QUIET, faults=(fault,))).ranks[0]
    assert named(result.incidents, Kind.SDC) == {fault.rank}


@pytest.mark.parametrize("name", ["dp4", "bf16", "dist_opt"])
def test_a_wrong_update_is_named(
    servers: Servers, name: str, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = LAYOUTS[name]
    fault = a_fault(draw, layout, kind="sdc", step=2, surface=Surface.OPTIMIZER)
    result = servers[INSTALLED].run(Job(layout, str(tmp_path), QUIET, 9, faults=(fault,))).ranks[0]
    assert named(result.incidents, Kind.SDC) == {fault.rank}


def test_megatrons_hash_check_accuses_the_others_when_rank_0_is_bad(
    servers: Servers, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    fault = a_fault(draw, LAYOUTS["dp4"], kind="sdc", rank=0, step=2, surface=Surface.PARAMETER)
    job = Job(LAYOUTS["dp4"], str(tmp_path), QUIET, faults=(fault,), hash_check=True)
    ranks = servers[INSTALLED].run(job).ranks
    assert [result.hashes_agree for result in ranks] == [True, False, False, False]
    assert all(named(result.incidents, Kind.SDC) == {0} for result in ranks)


def test_a_skipped_update_counts_as_a_step_and_accuses_nobody(
    servers: Servers, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    layout = replace(LAYOUTS["dp4"], half="fp16", optimizer={"loss_scale": 1.0})
    step = draw.randrange(1, 3)
    off = servers[INSTALLED].run(Job(layout, f"{tmp_path}/off", overflow=step))
    on = servers[INSTALLED].run(Job(layout, f"{tmp_path}/on", QUIET, overflow=step))
    assert_unchanged(off, on)
    assert [result.skipped for result in on.ranks] == [1] * layout.ranks


def pretrain(folder: pathlib.Path, *more: str, scout: bool = True, **fields: Any) -> PretrainJob:
    ranks = fields.pop("ranks", 3)
    script = fields.pop("script", "small.sh")
    options = ("--scout", "--scout-interval-steps", "1", "--scout-on-error", "raise")
    quiet = ("--scout-kappa", "1e6", "--scout-run-dir", f"{folder}/scout")
    batch = ("--global-batch-size", str(4 * ranks))
    argv = (*arguments_of(script), *batch, *CPU, *((*options, *quiet) if scout else ()), *more)
    return PretrainJob(ranks, argv, str(folder), **fields)


def test_real_pretrain_with_the_switch_is_the_same_training(
    servers: Servers, tmp_path: pathlib.Path
) -> None:
    off = servers[NEXT].run(pretrain(tmp_path / "off", "--train-iters", "5", scout=False))
    on = servers[NEXT].run(pretrain(tmp_path / "on", "--train-iters", "5"))
    assert_unchanged(off, on)
    assert [result.steps for result in on.ranks] == [5, 5, 5]
    assert len(on.ranks[0].losses) == 5


def test_a_script_may_pass_the_options_on_itself_and_sees_the_counters(
    servers: Servers, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fault = FaultAt("sdc", draw.randrange(3), step=1, layer=draw.randrange(4), seed=2)
    more = ("--train-iters", "7", "--tensorboard-dir", f"{tmp_path}/board")
    job = pretrain(tmp_path, *more, launched=False, faults=(fault,))
    assert named(servers[NEXT].run(job).ranks[0].incidents, Kind.SDC) == {fault.rank}
    written = reader.EventAccumulator(f"{tmp_path}/board").Reload()
    assert [event.value for event in written.Scalars("scout/checks")] == [1, 2, 3, 4, 5, 6, 7]
    assert written.Scalars("scout/incidents/sdc")[-1].step == 7


def test_saves_are_gated_and_a_restart_begins_before_the_corruption(
    servers: Servers, draw: random.Random, tmp_path: pathlib.Path
) -> None:
    saves = tmp_path / "checkpoints"
    options = ("--save", str(saves), "--load", str(saves), "--save-interval", "4")
    fault = FaultAt("sdc", draw.randrange(3), step=14, layer=draw.randrange(4), seed=1)
    bad = pretrain(tmp_path / "bad", *options, "--train-iters", "20", faults=(fault,))
    first = servers[NEXT].run(bad).ranks[0]
    assert named(first.incidents, Kind.SDC) == {fault.rank}
    assert first.incidents[0].checkpoint is not None
    assert (saves / "iter_0000012").exists()
    assert not (saves / "iter_0000020").exists()  # the gate does not take a condemned save
    again = servers[NEXT].run(pretrain(tmp_path / "again", *options, "--train-iters", "20"))
    verified = [4, 8, 12]
    assert again.ranks[0].started_at in verified
    assert again.ranks[0].started_at == first.incidents[0].checkpoint.step
    assert "starting from the verified checkpoint" in log_of(again.job.folder, 0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--scout-interval-steps", "0"), "interval_steps='0' in the option"),
        (("--scout-hang-stall-timeout-s", "soon"), "hang.stall_timeout_s='soon' in the option"),
        (("--scout-layers", "("), "layers='(' is no regular expression"),
    ],
)
def test_a_bad_option_is_one_clear_error_before_training(
    servers: Servers, option: tuple[str, ...], message: str, tmp_path: pathlib.Path
) -> None:
    outcome = servers[NEXT].attempt(pretrain(tmp_path, *option))
    assert all(code != 0 for code in outcome.codes)
    assert f"scout: {message}" in log_of(str(tmp_path), 0)


SPAWNING = """
import multiprocessing, sys

def watching():
    return "scout_megatron.training" in sys.modules

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(watching(), pool.apply(watching))
"""


@needs_next
def test_what_a_save_spawns_is_not_watched(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, "-m", "scout_megatron", str(script), "--scout"],
        env=cpu_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["True False"], done.stderr[-2000:]


@needs_next
def test_small_sh_runs_as_it_is(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [str(CONFIGS / "small.sh"), *CPU, "--train-iters", "4", "--scout-run-dir", str(tmp_path)],
        env=cpu_environment(RANKS="4"),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "scout: 2 checks in 4 steps, 0 incident(s)" in done.stderr


def test_the_arguments_of_moe_sh_train_and_cover_its_experts(
    servers: Servers, tmp_path: pathlib.Path
) -> None:
    job = pretrain(tmp_path, "--train-iters", "4", script="moe.sh", ranks=4)
    result = servers[NEXT].run(job).ranks[0]
    assert result.incidents == []
    assert [ranks for kind, ranks in result.groups if kind == "expert"] == [(0, 2), (1, 3)]
