"""Jobs that are corrupted, slowed, killed and damaged restart from the right checkpoint.

Every case ends as a run that was never disturbed, bit for bit.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from integration_tests.checkpoint_jobs import RANKS, Case, Result, launch, watched
from scout_core.decision.labels import Label
from scout_core.integration.trust_record import TrustStore
from scout_core.lab.faults import FaultAt, Surface
from scout_core.testing import run_ranks

STEPS = 18
pytestmark = pytest.mark.timeout(240)


def start(run: pathlib.Path, case: Case, dead: tuple[int, ...] = ()) -> list[Any]:
    return run_ranks(RANKS, launch, str(run), case, timeout_s=120.0, allow_dead=dead)


def only(results: list[Any]) -> Result:
    """Return what all ranks agree on; a stopped job's ranks may differ in their state."""
    assert all(isinstance(result, Result) for result in results), results
    told = {replace(result, state="") if result.stopped else result for result in results}
    assert len(told) == 1, told
    return told.pop()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Signature of the final state of a run without faults."""
    with tempfile.TemporaryDirectory() as folder:
        return only(start(pathlib.Path(folder), Case())).state


@pytest.fixture(scope="module")
def undisturbed_session() -> str:
    """The same under a real session."""
    with tempfile.TemporaryDirectory() as folder:
        return only(run_ranks(RANKS, watched, folder, STEPS, None, timeout_s=200.0)).state


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A run's folder, in memory where there is one: the speed of a disk is not tested here."""
    shared = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield pathlib.Path(folder)


def steps_with(run: pathlib.Path, *labels: Label) -> list[int]:
    entries = TrustStore(run / "checkpoints").load().checkpoints
    return [entry.step for entry in entries if entry.label in labels]


def place_of(run: pathlib.Path, step: int) -> pathlib.Path:
    entries = TrustStore(run / "checkpoints").load().checkpoints
    path = next(entry.path for entry in reversed(entries) if entry.step == step)
    return run / "checkpoints" / path


def last_verified(step: int) -> int:
    """K = 2, a clean check and a save per step: what is verified after the check of `step`."""
    return max(0, (step // 2 - 1) * 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_a_corruption_at_a_random_step_training_ends_as_if_nothing_had_happened(
    run: pathlib.Path, undisturbed: str, asynchronous: bool
) -> None:
    step, rank = random.randint(1, 12), random.randrange(RANKS)
    broken = only(start(run, Case(corrupt={step: rank}, asynchronous=asynchronous)))
    assert (broken.stopped, broken.step) == ("sdc", step)
    again = only(start(run, Case(asynchronous=asynchronous)))
    assert again.resumed == last_verified(step - 1)
    assert again.state == undisturbed


@pytest.mark.parametrize("surface", [Surface.OUTPUT, Surface.PARAMETER])
def test_a_session_finds_the_corruption_and_the_restart_ends_as_if_nothing_had_happened(
    run: pathlib.Path, undisturbed_session: str, surface: Surface
) -> None:
    fault = FaultAt(
        "sdc",
        random.randrange(RANKS),
        random.randint(10, 12),
        layer=random.randrange(2),
        surface=surface,
    )
    broken = only(run_ranks(RANKS, watched, str(run), STEPS, fault, timeout_s=200.0))
    assert broken.stopped == "sdc"
    assert broken.labels[-1] is Label.CONDEMNED
    again = only(run_ranks(RANKS, watched, str(run), STEPS, None, timeout_s=200.0))
    assert 0 < again.resumed <= fault.step
    assert again.state == undisturbed_session


def test_torchrun_restarts_the_example_in_place_from_the_verified_checkpoint(
    run: pathlib.Path,
) -> None:
    script = pathlib.Path(__file__).parent.parent / "configs" / "recovery" / "train_torchrun.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(RANKS), "--max-restarts", "2", str(script)]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ends = {}
    for name, corrupt in (("broken", f"{random.randrange(RANKS)}:44"), ("whole", "")):
        command = [*torchrun, "--run-dir", str(run / name), "--steps", "60", "--corrupt", corrupt]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)
        assert done.returncode == 0, done.stderr[-3000:]
        # Lines of different processes may run into one another.
        starts = re.findall(r"launch 1 goes on from step (32|40)", done.stdout)
        sums = re.findall(r"sum of parameters (-?\d+\.\d+?)(?=rank|\s)", done.stdout)
        assert len(sums) == RANKS
        ends[name] = set(sums)
        if corrupt:
            assert len(starts) == RANKS
        else:
            assert starts == []
    assert ends["broken"] == ends["whole"]
    assert len(ends["whole"]) == 1


def test_after_a_straggler_training_goes_on_from_the_latest(
    run: pathlib.Path, undisturbed: str
) -> None:
    step, rank = random.randint(2, 12), random.randrange(RANKS)
    assert only(start(run, Case(slow={step: rank}))).stopped == "straggler"
    again = only(start(run, Case()))
    assert again.resumed == step
    assert again.state == undisturbed


def test_a_straggler_and_a_corruption_in_one_cycle_lead_to_the_verified(
    run: pathlib.Path, undisturbed: str
) -> None:
    slow, corrupt = random.sample(range(RANKS), 2)
    case = Case(slow={7: slow}, corrupt={7: corrupt})
    assert only(start(run, case)).stopped == "sdc"
    again = only(start(run, Case(failure="straggler")))  # what was seen counts, not what is said
    assert again.resumed == 4
    assert again.state == undisturbed


@pytest.mark.parametrize(("sweep", "resumed"), [(None, 6), (True, 8)])
def test_a_rank_killed_while_it_saves_costs_nothing_that_was_complete(
    run: pathlib.Path, undisturbed: str, sweep: bool | None, resumed: int
) -> None:
    rank = random.randrange(RANKS)
    results = start(run, Case(kill={9: (rank,)}, deadline_s=8.0), dead=(rank,))
    assert results[rank] is None
    assert all(isinstance(told, str) for at, told in enumerate(results) if at != rank), results
    assert 9 not in steps_with(run, *Label)
    again = only(start(run, Case(sweep_clean=sweep)))
    assert again.resumed == resumed
    assert again.state == undisturbed


def test_all_ranks_killed_while_they_save_leave_the_former_checkpoints(
    run: pathlib.Path, undisturbed: str
) -> None:
    everyone = tuple(range(RANKS))
    assert start(run, Case(kill={8: everyone}), dead=everyone) == [None] * RANKS
    assert steps_with(run, Label.VERIFIED)[-1] == 6
    again = only(start(run, Case(sweep_clean=True)))
    assert again.resumed == 7
    assert again.state == undisturbed
    assert not list((run / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_shard_of_the_verified_leads_to_the_one_before(
    run: pathlib.Path, undisturbed: str, damage: str
) -> None:
    assert only(start(run, Case(corrupt={9: 1}))).stopped == "sdc"
    shards = sorted(place_of(run, 6).glob("*.distcp"))
    shard = random.choice(shards)
    content = bytearray(shard.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    shard.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    again = only(start(run, Case()))
    assert again.resumed == 4
    assert again.state == undisturbed


def test_a_machine_lost_in_mid_cycle_takes_its_memory_and_nothing_verified(
    run: pathlib.Path, undisturbed: str
) -> None:
    everyone = tuple(range(RANKS))
    start(run, Case(kill={9: everyone}), dead=everyone)
    for left in (run / "memory").iterdir():
        shutil.rmtree(left)
    again = only(start(run, Case(failure="unreachable")))
    assert again.resumed == 6
    assert again.state == undisturbed
