"""Experts in real jobs: a fault that fires at one row count is named with its shape."""

from __future__ import annotations

import json
import pathlib
import random
from dataclasses import replace
from typing import Any

import pytest

from integration_tests.moe_jobs import (
    Seen,
    damaged_payload,
    each_rank_in_turn,
    executed_rows,
    off_and_on,
    plan_of,
    uncovered,
)
from scout_core.decision.catalog_file import CatalogFile, checksum
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Incident, Kind
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import read_catalog, write_catalog
from scout_core.lab import moe_catalog
from scout_core.lab.drill import EXPERT_STAGES, DrillPlan
from scout_core.lab.parallel import topology
from scout_core.testing import RankFailed, preload, run_ranks

pytestmark = pytest.mark.timeout(400)
preload(["integration_tests.moe_jobs"])


def drawn() -> random.Random:
    """A generator whose seed is shown when the test fails."""
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    return random.Random(seed)


def catalogue(folder: pathlib.Path, plan: DrillPlan) -> CatalogFile:
    """The catalogue of a job, written to its folder."""
    layout = topology(plan.parallelism, plan.ranks)
    return read_catalog(moe_catalog.write(str(folder), plan.model.width, plan.moe, layout))


def judged(incidents: list[Incident]) -> list[Incident]:
    """Leave out that a busy machine was slow."""
    return [incident for incident in incidents if incident.kind is not Kind.GROUP_SLOWDOWN]


def assert_named(seen: Seen, ranks: int, number: int = 0) -> None:
    """The fault was named with its rows, and no other rank was."""
    fault, found = seen.faults[number], judged(seen.incidents[number])
    assert {incident.kind for incident in found} == {Kind.SDC}
    assert {rank for incident in found for rank in incident.culprit_ranks} == {fault.rank}
    named = next(i for i in found if fault.rows in i.evidence.get("rows", ()))
    assert named.status is Status.ATTRIBUTED
    assert f"moe.experts at 2 x {fault.rows} rows" in named.message
    assert named.peer_group == tuple(r for r in range(ranks) if r % 2 == fault.rank % 2)


def test_a_fault_at_one_row_count_of_any_rank_is_named_with_its_shape_in_one_cycle(
    tmp_path: pathlib.Path,
) -> None:
    draw = drawn()
    plan = plan_of(6, draw.randrange(1 << 16))
    catalogue(tmp_path, plan)
    faulty = draw.sample(range(6), 6)
    results = run_ranks(6, each_rank_in_turn, plan, str(tmp_path), faulty, timeout_s=380)
    for seen in results:
        assert judged(seen.healthy) == []
        assert [fault.rank for fault in seen.faults] == faulty
        for number in range(6):
            assert_named(seen, 6, number)
        assert seen.sweeps == [True, False]
    assert "8 representatives of 8 shapes" in results[0].lines[0]
    assert len([name for name in results[0].recipes if name.startswith("expert:")]) == 9


def test_rows_that_the_catalogue_omits_are_replayed_themselves(tmp_path: pathlib.Path) -> None:
    draw = drawn()
    plan = plan_of(6, draw.randrange(1 << 16), most_rows=16)
    path = tmp_path / moe_catalog.CATALOGUE
    catalogue(tmp_path, plan)
    experts = {"modules": EXPERT_STAGES, "catalogue": str(path)}
    faulty = draw.randrange(6)
    results = run_ranks(6, executed_rows, plan, str(tmp_path), faulty, experts, timeout_s=380)
    for seen in results:
        assert judged(seen.healthy) == []
        assert_named(seen, 6)
        assert seen.executed[0] == seen.executed[1] > 0
        assert " 0.00 % by exact replay" not in seen.lines[1]


def test_in_another_environment_executed_rows_are_replayed_and_the_field_is_named(
    tmp_path: pathlib.Path,
) -> None:
    draw = drawn()
    plan = plan_of(6, draw.randrange(1 << 16), most_rows=16)
    file = catalogue(tmp_path, plan)
    other = replace(file, environment=replace(file.environment, driver="999.1"))
    path = tmp_path / moe_catalog.CATALOGUE
    write_catalog(path, other)
    experts = {"modules": EXPERT_STAGES, "catalogue": str(path)}
    results = run_ranks(
        6, executed_rows, plan, str(tmp_path), draw.randrange(6), experts, timeout_s=380
    )
    for seen in results:
        assert judged(seen.healthy) == []
        assert "driver: '999.1' in the catalogue" in seen.lines[0]
        assert "0.00 % by catalogue" in seen.lines[1]
        assert_named(seen, 6)


def test_in_another_environment_experts_are_left_out_where_that_is_wanted(
    tmp_path: pathlib.Path,
) -> None:
    plan = plan_of(4, 1)
    file = catalogue(tmp_path, plan)
    path = tmp_path / moe_catalog.CATALOGUE
    write_catalog(path, replace(file, environment=replace(file.environment, nccl="9.9")))
    experts = {"modules": EXPERT_STAGES, "catalogue": str(path), "on_drift": "not_covered"}
    results = run_ranks(4, uncovered, plan, str(tmp_path), experts, timeout_s=300)
    for seen in results:
        assert judged(seen.healthy) == []
        assert not any(name.startswith("expert:") for name in seen.recipes)
        (gap,) = seen.not_covered
        assert "expert replay not covered" in gap
        assert "nccl: '9.9' in the catalogue" in gap


def test_a_catalogue_with_a_wrong_count_stops_the_start_on_all_ranks(
    tmp_path: pathlib.Path,
) -> None:
    plan = plan_of(4, 1)
    file = catalogue(tmp_path, plan).to_json()
    regime: dict[str, Any] = file["regimes"][0]
    merged = {**regime, "shapes": [[8], [16]], "counts": [[1], [2]], "representative": [1, 1]}
    wrong = {**merged, "counts": [[3], [2]]}  # the representative executes less
    path = tmp_path / moe_catalog.CATALOGUE
    content = {**file, "regimes": [wrong]}
    del content["checksum"]
    path.write_text(json.dumps({**content, "checksum": checksum(content)}))
    experts = {"modules": EXPERT_STAGES, "catalogue": str(path)}
    with pytest.raises(RankFailed, match="does not execute what it should cover"):
        run_ranks(4, uncovered, plan, str(tmp_path), experts, timeout_s=300)
    with pytest.raises(ScoutError, match="does not execute what it should cover"):
        read_catalog(path)


def test_scout_changes_no_bit_of_a_job_with_experts(tmp_path: pathlib.Path) -> None:
    plan = plan_of(6, drawn().randrange(1 << 16))
    catalogue(tmp_path, plan)
    for off, on, seen, incidents in run_ranks(6, off_and_on, plan, str(tmp_path), 6, timeout_s=380):
        assert on == off
        assert judged(incidents) == []
        assert seen.executed[0] == seen.executed[1] > 0
        assert seen.not_covered == ()


def test_a_damaged_all_to_all_is_found_and_between_two_ranks_nobody_is_named(
    tmp_path: pathlib.Path,
) -> None:
    plan = plan_of(4, 3)
    faulty = drawn().randrange(4)
    partner = faulty ^ 1
    for found in run_ranks(4, damaged_payload, plan, str(tmp_path), faulty, timeout_s=300):
        (incident,) = judged(found)
        assert incident.reason == "SDC_ALLTOALL"
        assert incident.peer_group == tuple(sorted((faulty, partner)))
        assert {receiver for _, receiver in incident.evidence["damaged"]} == {faulty}
