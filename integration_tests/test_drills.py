"""Drills and small campaigns: real processes, random faults, exactly the right rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Kind
from scout_core.lab.campaign import TINY, CampaignPlan, run_campaign
from scout_core.lab.drill import DrillPlan, draw_fault, run_drill, steps_needed
from scout_core.lab.faults import Magnitude, Surface
from scout_core.lab.model import GPTConfig
from scout_core.lab.parallel import Parallelism

LAYOUTS = [
    (Parallelism.DDP, 3),
    (Parallelism.DDP, 8),
    (Parallelism.FSDP2, 4),
    (Parallelism.HSDP, 4),
    (Parallelism.HSDP, 8),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("parallelism", "ranks"), LAYOUTS)
def test_every_random_corruption_is_attributed_to_its_rank(
    parallelism: Parallelism, ranks: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    plan = CampaignPlan(parallelism, ranks, injections=6, seed=seed, min_low_bit=2, timeout_s=280)
    outcome = run_campaign(plan)
    assert outcome.missed == []
    assert outcome.false == []
    assert outcome.clean_checks >= 6


def sdc_plan(ranks: int, faulty: list[int], magnitudes: list[Magnitude]) -> DrillPlan:
    faults = [
        draw_fault(
            "sdc",
            ranks,
            2,
            seed,
            rank=rank,
            layer=1,
            step=2,
            magnitude=magnitude,
            surface=Surface.OUTPUT,
        )
        for seed, (rank, magnitude) in enumerate(zip(faulty, magnitudes, strict=True))
    ]
    model = replace(TINY, layers=2)
    return DrillPlan(Parallelism.DDP, ranks, tuple(faults), 8, 1, model=model, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_faulty_ranks_out_of_five_with_other_wrong_values_are_both_named(seed: int) -> None:
    faulty = random.Random(seed).sample(range(5), 2)
    outcome = run_drill(sdc_plan(5, faulty, [Magnitude.SIGN, Magnitude.LOW_BIT]))
    assert outcome.passed
    named = {rank for incident in outcome.incidents for rank in incident.culprit_ranks}
    assert named == set(faulty)


@pytest.mark.timeout(120)
def test_two_faulty_ranks_out_of_four_are_inconclusive_and_nobody_is_named() -> None:
    faulty = random.Random(5).sample(range(4), 2)
    outcome = run_drill(sdc_plan(4, faulty, [Magnitude.SIGN, Magnitude.MID_BIT]))
    sdc = [incident for incident in outcome.incidents if incident.kind is Kind.SDC]
    assert sdc
    assert all(incident.status is Status.INCONCLUSIVE for incident in sdc)
    assert all(incident.culprits == () for incident in outcome.incidents)
    assert "nobody can be named" in sdc[0].message


@pytest.mark.timeout(120)
def test_two_ranks_detect_but_do_not_attribute() -> None:
    outcome = run_drill(sdc_plan(2, [1], [Magnitude.MID_BIT]))
    assert outcome.incidents
    assert all(incident.culprits == () for incident in outcome.incidents)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("ranks", "percent"), [(3, 50.0), (4, 30.0)])
def test_a_compute_straggler_is_named(ranks: int, percent: float) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    fault = draw_fault("straggler", ranks, 4, seed, percent=percent, step=8)
    outcome = run_drill(DrillPlan(Parallelism.DDP, ranks, (fault,), 24, 1, timeout_s=180))
    assert outcome.passed


UNEVEN = [
    ("stage_imbalance", Parallelism.PP_FSDP, 4, "IMBALANCE_STAGE"),
    ("sequence_imbalance", Parallelism.DDP, 3, "IMBALANCE_DATA"),
    ("rotating_pauses", Parallelism.DDP, 3, "IMBALANCE_PAUSES"),
    ("slow_loading", Parallelism.FSDP2, 3, "IMBALANCE_LOADING"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "parallelism", "ranks", "reason"), UNEVEN)
def test_uneven_work_is_explained_and_names_nobody(
    kind: str, parallelism: Parallelism, ranks: int, reason: str
) -> None:
    fault = draw_fault(kind, ranks, 1, random.SystemRandom().randrange(1 << 16))
    model = GPTConfig(layers=2) if kind.endswith("imbalance") else TINY
    steps = steps_needed([fault], 6, model.layers)
    plan = DrillPlan(parallelism, ranks, (fault,), steps, 6, model=model, timeout_s=280)
    outcome = run_drill(plan)
    assert outcome.missed == []
    assert reason in {incident.reason for incident in outcome.incidents}
    assert all(incident.culprits == () for incident in outcome.incidents)


@pytest.mark.timeout(300)
def test_a_corruption_in_a_pipeline_stage_is_named_among_the_ranks_of_its_stage() -> None:
    fault = draw_fault("sdc", 6, 2, random.SystemRandom().randrange(1 << 16), step=2)
    outcome = run_drill(
        DrillPlan(Parallelism.PP_FSDP, 6, (fault,), steps_needed([fault], 1, 4), 1, timeout_s=280)
    )
    assert outcome.passed
