"""DeepSpeed: every layout, every fault, the right rank; and not one bit of training changed."""

from __future__ import annotations

import importlib.util
import pathlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from integration_tests.deepspeed_cases import (
    EVERYTHING,
    LAYOUTS,
    SCOUT,
    Layout,
    Options,
    Result,
    run,
)
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Incident, Kind
from scout_core.lab.faults import FaultAt, Magnitude, Surface
from scout_core.report.events import RunDir
from scout_core.testing import preload, run_ranks

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]
preload(["integration_tests.deepspeed_server", "integration_tests.deepspeed_jobs"])

QUIET = {**SCOUT, "kappa": 1e6}  # replays of a millisecond on shared cores: time is not judged
STALL_S = 2.0


def on_ranks(layout: Layout, options: Options) -> list[Result]:
    results: list[Result] = run_ranks(layout.ranks, run, "train", layout, options, timeout_s=170)
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_scout_changes_no_bit_of_training(name: str, tmp_path: pathlib.Path) -> None:
    layout = LAYOUTS[name]
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_computes_wrongly_is_named(name: str, tmp_path: pathlib.Path) -> None:
    layout, draw = LAYOUTS[name], drawn()
    fault = FaultAt(
        draw.choice(["sdc", "gradient"]),
        draw.randrange(layout.ranks),
        step=draw.randrange(2),
        layer=draw.randrange(layers_of(layout)),
        surface=Surface.OUTPUT,
        magnitude=draw.choice([Magnitude.MID_BIT, Magnitude.EXPONENT, Magnitude.SIGN]),
        seed=draw.randrange(1 << 16),
    )
    options = Options(QUIET, steps=fault.step + 5, faults=(fault,), run_dir=str(tmp_path))
    for result in on_ranks(layout, options):
        assert named(result.incidents, Kind.SDC) == {fault.rank}
        (incident,) = result.incidents
        assert incident.status is Status.ATTRIBUTED
        assert incident.peer_group == layout.peers_of(fault.rank)


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
    run_ranks(layout.ranks, run, *body, timeout_s=120, allow_dead=everyone)
    (incident,) = RunDir(tmp_path).incidents()
    assert incident.kind is Kind.HANG
    assert incident.culprit_ranks == (rank,)
    assert "stand_still" in incident.culprits[0].where
    assert rank not in incident.victims


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slow_rank_is_named(name: str, tmp_path: pathlib.Path) -> None:
    layout, draw = LAYOUTS[name], drawn()
    slow = FaultAt("straggler", draw.randrange(layout.ranks), step=1, percent=300.0)
    scout = {**SCOUT, "timing_repeats": 4}
    options = Options(scout, steps=9, faults=(slow,), width=96, run_dir=str(tmp_path))
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
