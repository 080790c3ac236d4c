"""DeepSpeed: every layout, every fault, the right rank; and not one bit of training changed."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from integration_tests.deepspeed_cases import (
    EVERYTHING,
    LAYOUTS,
    PRELOADED,
    SCOUT,
    VARIANTS,
    Layout,
    Options,
    Result,
    run,
)
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Incident, Kind
from scout_core.lab.faults import FaultAt, Magnitude, Surface
from scout_core.report.events import RunDir
from scout_core.testing import preload, reserved_port, run_ranks

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]
preload(PRELOADED)

QUIET = {**SCOUT, "kappa": 1e6}  # replays of a millisecond on shared cores: time is not judged
STALL_S = 2.0


def on_ranks(layout: Layout, options: Options) -> list[Result]:
    results: list[Result] = run_ranks(layout.ranks, run, "train", layout, options, timeout_s=380)
    return results


def drawn() -> random.Random:
    """A generator whose seed is shown when the test fails."""
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    return random.Random(seed)


def layers_of(layout: Layout) -> int:
    """Layers that one rank holds."""
    return 2 if layout.kind == "pipeline" else 4


def named(incidents: Sequence[Incident], kind: Kind) -> set[int]:
    """Ranks that incidents of a kind blame."""
    return {rank for i in incidents if i.kind is kind for rank in i.culprit_ranks}


@pytest.mark.parametrize("name", {**LAYOUTS, **VARIANTS})
def test_scout_changes_no_bit_of_training(name: str, tmp_path: pathlib.Path) -> None:
    layout = {**LAYOUTS, **VARIANTS}[name]
    scout = {**EVERYTHING, "kappa": 1e6}
    off = on_ranks(layout, Options())
    on = on_ranks(layout, Options(scout, run_dir=str(tmp_path)))
    for without, with_scout in zip(off, on, strict=True):
        assert with_scout.losses == without.losses
        assert with_scout.parameters == without.parameters
        assert with_scout.masters == without.masters
        assert with_scout.incidents == []
        assert with_scout.not_covered == ()
        assert with_scout.checks == with_scout.steps == 4


@pytest.mark.parametrize(
    ("name", "kind", "inside"),
    [
        ("autotp", "partial", ""),
        ("autotp", "sdc", "up"),
        ("moe", "sdc", "moe.deepspeed_moe.experts"),
        ("ulysses", "sdc", "attention.shared.local_attn"),
    ],
)
def test_partners_that_a_wrong_rank_makes_wrong_are_not_named(
    name: str, kind: str, inside: str, tmp_path: pathlib.Path
) -> None:
    # In float32, where no rounding after the sum can hide the fault.
    layout, draw = replace(LAYOUTS[name], overrides={"bf16": {"enabled": False}}), drawn()
    rank, seed = draw.randrange(layout.ranks), draw.randrange(1 << 16)
    fault = FaultAt(kind, rank, step=1, magnitude=Magnitude.EXPONENT, seed=seed)
    options = Options(QUIET, 5, faults=(fault,), inside=inside, run_dir=str(tmp_path))
    for result in on_ranks(layout, options):
        assert named(result.incidents, Kind.SDC) == {fault.rank}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_stands_still_is_named_and_the_others_are_victims(
    name: str, tmp_path: pathlib.Path
) -> None:
    layout, draw = LAYOUTS[name], drawn()
    rank, layer = draw.randrange(layout.ranks), draw.randrange(layers_of(layout))
    fault = FaultAt("hang", rank, step=2, layer=layer)
    scout = {**SCOUT, "hang": {"stall_timeout_s": STALL_S}}
    options = Options(scout, steps=5, faults=(fault,), run_dir=str(tmp_path))
    everyone = range(layout.ranks)
    body = ("train_until_a_report", layout, options)
    run_ranks(layout.ranks, run, *body, timeout_s=300, allow_dead=everyone)
    (incident,) = RunDir(tmp_path).incidents()
    assert incident.kind is Kind.HANG
    assert incident.culprit_ranks == (rank,)
    assert "stand_still" in incident.culprits[0].where
    assert rank not in incident.victims


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slow_rank_is_named(name: str, tmp_path: pathlib.Path) -> None:
    layout, draw = LAYOUTS[name], drawn()
    slow = FaultAt("straggler", draw.randrange(layout.ranks), step=1, percent=300.0)
    options = Options(
        {**SCOUT, "timing_repeats": 4},
        steps=12,
        until=Kind.STRAGGLER,
        faults=(slow,),
        width=96,
        run_dir=str(tmp_path),
    )
    for result in on_ranks(layout, options):
        assert named(result.incidents, Kind.STRAGGLER) == {slow.rank}
        assert named(result.incidents, Kind.SDC) == set()


@pytest.mark.parametrize("name", ["zero3", "hpz"])
def test_a_corrupt_shard_is_named_by_its_owner_alone(name: str, tmp_path: pathlib.Path) -> None:
    layout, draw = LAYOUTS[name], drawn()
    fault = FaultAt(
        "shard",
        draw.randrange(layout.ranks),
        step=draw.randrange(1, 4),
        layer=draw.randrange(4),
        magnitude=draw.choice(list(Magnitude)),
        seed=draw.randrange(1 << 16),
    )
    # No check looks at the step of the fault, and the update heals it: the watch still saw it.
    options = Options({**QUIET, "interval_steps": 5}, 5, faults=(fault,), run_dir=str(tmp_path))
    for result in on_ranks(layout, options):
        (incident,) = result.incidents
        assert incident.reason == "SDC_MASTER_COHERENCE"
        assert incident.culprit_ranks == (fault.rank,)
        assert f"layers.{fault.layer}." in incident.message
        assert f"after {fault.step} steps" in incident.message


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "pipeline"])
def test_a_corrupt_master_weight_is_named_by_its_owner_alone(
    name: str, tmp_path: pathlib.Path
) -> None:
    layout, draw = LAYOUTS[name], drawn()
    rank, seed = draw.randrange(layout.ranks), draw.randrange(1 << 16)
    magnitude = draw.choice([Magnitude.LOW_BIT, Magnitude.MID_BIT, Magnitude.SIGN])
    fault = FaultAt("master", rank, step=2, magnitude=magnitude, seed=seed)
    options = Options(QUIET, steps=4, faults=(fault,), run_dir=str(tmp_path))
    for result in on_ranks(layout, options):
        (incident,) = result.incidents
        assert incident.reason in ("SDC_AT_REST", "SDC_MASTER_COHERENCE")
        assert incident.culprit_ranks == (fault.rank,)


BAD_BLOCKS = {
    "unknown key 'interval'": {"enabled": True, "interval": 3},
    "unknown key 'hang.limit'": {"enabled": True, "hang": {"limit": 3}},
    "interval_steps=0": {"enabled": True, "interval_steps": 0},
    "interval_steps='3 steps'": {"enabled": True, "interval_steps": "3 steps"},
    "it must be an object": "on",
    "matches no module": {"enabled": True, "layers": "^blocks"},
}


def test_initialize_refuses_a_bad_block_with_one_error_that_names_the_key() -> None:
    for said in run_ranks(2, run, "refusals", list(BAD_BLOCKS.values()), timeout_s=150):
        *of_blocks, of_engine = said
        for expected, text in zip(BAD_BLOCKS, of_blocks, strict=True):
            assert expected in text
        assert "the engine has no optimizer" in of_engine


def test_ulysses_with_a_mesh_keeps_sequence_partners_apart(tmp_path: pathlib.Path) -> None:
    mesh = {"data_parallel_size": 3}
    layout = replace(LAYOUTS["ulysses"], kind="ulysses_mesh", overrides=mesh)
    fault = FaultAt("sdc", drawn().randrange(6), step=0, magnitude=Magnitude.SIGN)
    options = Options(QUIET, steps=4, faults=(fault,), run_dir=str(tmp_path))
    for result in on_ranks(layout, options):
        (incident,) = result.incidents
        assert incident.culprit_ranks == (fault.rank,)
        assert incident.peer_group == layout.peers_of(fault.rank)


def test_steps_that_overflow_are_checked_like_others_and_retire_no_recipe(
    tmp_path: pathlib.Path,
) -> None:
    overflow = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    layout, draw = replace(LAYOUTS["zero2"], ranks=3, overrides=overflow), drawn()
    # The lowest bit of a master, which its parameter does not show, in a step without an update.
    flip = {"magnitude": Magnitude.LOW_BIT, "seed": draw.randrange(1 << 16)}
    fault = FaultAt("master", draw.randrange(3), step=draw.choice([1, 2]), **flip)
    options = Options(QUIET, steps=5, faults=(fault,), run_dir=str(tmp_path))
    for skipped, steps, checks, gaps, found in run_ranks(3, run, "skip_steps", layout, options):
        assert (skipped, steps, checks, gaps) == (2, 5, 5, [])
        assert [(i.reason, i.culprit_ranks) for i in found] == [("SDC_AT_REST", (fault.rank,))]


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_a_closed_session_leaves_the_engine_as_it_was(name: str, tmp_path: pathlib.Path) -> None:
    layout = LAYOUTS[name]
    options = Options(EVERYTHING, run_dir=str(tmp_path))
    for steps, wrapped in run_ranks(layout.ranks, run, "close_early", layout, options):
        assert (steps, wrapped) == (2, [])


def test_counters_reach_deepspeeds_monitor(tmp_path: pathlib.Path) -> None:
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    fault = FaultAt("sdc", 1, step=0, magnitude=Magnitude.SIGN)
    options = Options(QUIET, steps=3, faults=(fault,), run_dir=str(tmp_path / "run"))
    on_ranks(replace(LAYOUTS["zero1"], ranks=3, overrides=monitor), options)
    written = {path.name: path.read_text() for path in (tmp_path / "job").glob("Scout_*.csv")}
    assert {"Scout_checks.csv", "Scout_armed.csv", "Scout_incidents.csv"} <= written.keys()
    assert "Scout_incidents_sdc.csv" in written
    assert written["Scout_checks.csv"].split()[-1].endswith(",3.0")


CERTIFIABLE = ("zero1", "zero2", "pipeline", "autotp", "moe", "ulysses")
"""Layouts in which every state at rest has 3 replicas; ZeRO-3 shards have one owner."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wrong_rank_is_named_latest_names_only_a_proven_checkpoint_and_a_restart_loads_it(
    name: str, tmp_path: pathlib.Path
) -> None:
    layout, draw = LAYOUTS[name], drawn()
    fault = FaultAt(
        draw.choice(["sdc", "gradient"]),
        draw.randrange(layout.ranks),
        step=0,
        layer=draw.randrange(layers_of(layout)),
        surface=Surface.OUTPUT,
        magnitude=draw.choice([Magnitude.MID_BIT, Magnitude.EXPONENT, Magnitude.SIGN]),
        seed=draw.randrange(1 << 16),
    )
    options = Options(QUIET, faults=(fault,), run_dir=str(tmp_path))
    jobs = run_ranks(layout.ranks, run, "save_under_the_gate", layout, options, timeout_s=380)
    proven = jobs[0]["latest"][-1]
    for job in jobs:
        assert job["latest"][:-1] == [None] * (len(job["latest"]) - 1)
        (incident,) = job["incidents"]
        assert (incident.kind, incident.status) == (Kind.SDC, Status.ATTRIBUTED)
        assert incident.culprit_ranks == (fault.rank,)
        assert incident.peer_group == layout.peers_of(fault.rank)
        assert (job["latest"][-1], job["at_end"], job["saved"]) == (proven, proven, False)
    accepting = Options(
        {**QUIET, "accept_uncertified": name not in CERTIFIABLE}, run_dir=str(tmp_path)
    )
    body = ("load_by_the_gate", layout, accepting, "sdc")
    step = int(proven.removeprefix("global_step"))
    for job, told in zip(jobs, run_ranks(layout.ranks, run, *body, timeout_s=380), strict=True):
        assert told == (proven, job["held"][proven], step, step + 2, True)


def test_a_planned_end_names_the_newest_checkpoint_which_is_not_loaded_after_a_corruption(
    tmp_path: pathlib.Path,
) -> None:
    layout, options = replace(LAYOUTS["zero3"], ranks=3), Options(QUIET, run_dir=str(tmp_path))
    ended = run_ranks(3, run, "save_and_end", layout, options, timeout_s=300)
    assert ended[0][:2] == (None, "global_step1")
    for _, _, universal in ended:
        assert "latest_universal does not exist" in universal  # DeepSpeed's word: it is not gated
    after_corruption = ("load_by_the_gate", layout, options, "sdc")
    for refused, *_ in run_ranks(3, run, *after_corruption, timeout_s=300):
        assert "none of 1 checkpoints" in refused
        assert "load_checkpoint(dir, tag=...)" in refused
    body = ("load_by_the_gate", layout, options, "")  # the record knows of the planned end
    for name, _, steps, trained, clean in run_ranks(3, run, *body, timeout_s=300):
        assert (name, steps, trained, clean) == ("global_step1", 1, 3, True)


SCRIPT = pathlib.Path(__file__).with_name("deepspeed_script.py")


def write_config(folder: pathlib.Path, has_block: bool = True) -> pathlib.Path:
    """A configuration as a user writes it."""
    path = folder / "ds_config.json"
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    if has_block:
        run_dir = str(folder / "run")
        config["scout"] = {"enabled": True, "interval_steps": 2, "run_dir": run_dir}
    path.write_text(json.dumps(config))
    return path


def test_an_unchanged_script_needs_only_the_block_and_the_launcher(tmp_path: pathlib.Path) -> None:
    config, losses, plain = write_config(tmp_path), tmp_path / "losses", tmp_path / "plain"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    said = started(tmp_path, [*launcher, "-m", "scout_deepspeed.run", SCRIPT, config, losses])
    assert "scout: deepspeed, 1 peer group(s) of 3 can attribute" in said
    assert "scout: 3 checks in 6 steps, 0 incident(s)" in said
    without = write_config(tmp_path, has_block=False)
    body = ("run_script", str(without), str(plain))
    run_ranks(3, run, *body, init_group=False, timeout_s=150)
    assert losses.read_text() == plain.read_text()


def started(folder: pathlib.Path, words: Sequence[object], **environment: str) -> str:
    """Run Python in a process of its own and in a folder; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if name != "SCOUT_AUTOLOAD"}
    cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=kept | cpu | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


IMPORT_FIRST = (
    "import sys, runpy, scout_deepspeed; del sys.argv[0];"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


AUTOLOAD = {"SCOUT_AUTOLOAD": "1"}


@pytest.mark.parametrize(
    ("way", "environment", "has_block", "starts"),
    [
        (["-c", IMPORT_FIRST], {}, True, True),
        ([], AUTOLOAD, True, True),
        ([], AUTOLOAD, False, False),
        ([], {}, True, False),
    ],
)
def test_an_import_or_torchs_autoload_arms_too_and_nothing_starts_without_arms_or_block(
    way: list[str],
    environment: dict[str, str],
    has_block: bool,
    starts: bool,
    tmp_path: pathlib.Path,
) -> None:
    config, losses = write_config(tmp_path, has_block), tmp_path / "losses.json"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with reserved_port() as port:
        place = {**alone, "MASTER_PORT": str(port), **environment}
        said = started(tmp_path, [*way, SCRIPT, config, losses], **place)
    assert ("scout: deepspeed, 1 peer group(s) of 1" in said) is starts
    assert ("scout:" in said) is starts
    written = {"ds_config.json", "losses.json", *(["run"] if starts else [])}
    assert {path.name for path in tmp_path.iterdir()} == written
