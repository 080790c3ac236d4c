"""Tables of timings: read, diagnose, draw."""

from __future__ import annotations

import csv
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from scout_core.decision.incident import Incident
from scout_core.errors import ScoutError
from scout_core.lab.timings import diagnose, diagnose_timings, read_timings, render
from scout_core.lab.traces import TracePlan, simulate_trace, write_trace
from scout_core.report.heatmap import Heat, to_png, to_text

SHARED = pathlib.Path(
    os.environ.get("SCOUT_DATA", pathlib.Path(__file__).parents[2] / "shared" / "data")
)


def diagnosed(plan: TracePlan, folder: pathlib.Path, suffix: str = ".parquet") -> list[Incident]:
    path = folder / f"trace{suffix}"
    write_trace(simulate_trace(plan), path)
    return diagnose_timings(path)


def written(rows: list[dict[str, Any]], folder: pathlib.Path) -> pathlib.Path:
    path = folder / "table.csv"
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def plain_rows(slow: int | None = None, **extra: Any) -> list[dict[str, Any]]:
    """A table as a user might write it: other column names, no grid, no micro-batches."""
    noise = np.random.default_rng(1)
    return [
        {
            "rank": rank,
            "step": step,
            "operation": operation,
            "duration": 0.1 * (1.5 if rank == slow else 1) * np.exp(noise.normal(0, 0.01)),
            **extra,
        }
        for step in range(12)
        for rank in range(6)
        for operation in ("attention", "mlp", "all_reduce")
    ]


@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_slow_worker_of_a_trace_is_named(seed: int, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(seed)
    replicas, stages = int(rng.integers(2, 6)), int(rng.integers(2, 5))
    place = (int(rng.integers(replicas)), int(rng.integers(stages)))
    plan = TracePlan(replicas, stages, seed=seed, slow_workers={place: float(rng.uniform(1.2, 3))})
    (incident,) = diagnosed(plan, tmp_path, rng.choice([".csv", ".parquet"]))
    (culprit,) = incident.culprits
    assert culprit.coordinate is not None
    assert (culprit.coordinate.d, culprit.coordinate.p) == place


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_trace_gives_no_incident(seed: int, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 6, 3)]
    assert diagnosed(TracePlan(*sizes, seed=seed, noise=0.02), tmp_path) == []


@pytest.mark.parametrize("stage", range(4))
def test_a_slow_stage_names_no_rank(stage: int, tmp_path: pathlib.Path) -> None:
    plan = TracePlan(2, seed=stage, stage_work={stage: 1.6})
    (incident,) = diagnosed(plan, tmp_path)
    assert (incident.reason, incident.culprits) == ("IMBALANCE_STAGE", ())
    assert ("last stage slow" in incident.message) == (stage == 3)
    assert incident.evidence["factor"] == pytest.approx(1.6, rel=0.03)


@pytest.mark.parametrize("recorded", [True, False])
def test_uneven_sequences_name_no_rank(recorded: bool, tmp_path: pathlib.Path) -> None:
    plan = TracePlan(uneven_data=0.35, micro_batches=3, record_tokens=recorded, seed=3)
    (incident,) = diagnosed(plan, tmp_path)
    assert (incident.reason, incident.culprits) == ("IMBALANCE_DATA", ())
    assert incident.evidence["explained_by"] == ("tokens" if recorded else "stages")


@pytest.mark.parametrize("recorded", [True, False])
def test_garbage_collection_names_no_rank(recorded: bool, tmp_path: pathlib.Path) -> None:
    plan = TracePlan(pauses=0.2, pause_s=0.3, record_pauses=recorded, seed=4)
    (incident,) = diagnosed(plan, tmp_path)
    assert (incident.reason, incident.culprits) == ("IMBALANCE_PAUSES", ())
    assert ("measured" in incident.message) == recorded


@pytest.mark.skipif(not (SHARED / "straggler_traces").is_dir(), reason="no straggler_traces")
def test_the_published_trace_with_a_slow_worker_names_exactly_it() -> None:
    (incident,) = diagnose_timings(SHARED / "straggler_traces" / "trace-AR.parquet")
    (culprit,) = incident.culprits
    assert culprit.coordinate is not None
    assert (culprit.rank, culprit.coordinate.d, culprit.coordinate.p) == (0, 0, 0)


@pytest.mark.skipif(not (SHARED / "straggler_traces").is_dir(), reason="no straggler_traces")
def test_the_published_trace_with_a_slow_stage_names_no_rank() -> None:
    (incident,) = diagnose_timings(SHARED / "straggler_traces" / "trace-ST.parquet")
    assert (incident.reason, incident.culprits) == ("IMBALANCE_STAGE", ())
    assert "last stage slow: stage 3 takes 1.6" in incident.message


def test_a_table_without_grid_compares_all_ranks(tmp_path: pathlib.Path) -> None:
    assert diagnose_timings(written(plain_rows(), tmp_path)) == []
    (incident,) = diagnose_timings(written(plain_rows(slow=4, host="node-b"), tmp_path))
    assert [(c.rank, c.host) for c in incident.culprits] == [(4, "node-b")]


def test_without_a_stage_column_ranks_that_send_differently_are_no_peers(
    tmp_path: pathlib.Path,
) -> None:
    """A last stage has no forward-send; its ranks must not be blamed for having more work."""
    rows = simulate_trace(TracePlan(2, 4, stage_work={3: 1.6}, steps=10))
    for stage in (0, 1, 2):
        rows += [
            {**row, "optype": "forward-send", "duration": 0.001, "mb_id": -1}
            for row in rows
            if row["stage"] == stage and row["optype"] == "grads-reduce-scatter"
        ]
    bare = [{k: v for k, v in row.items() if k not in ("stage", "dp_rank")} for row in rows]
    (incident,) = diagnose_timings(written(bare, tmp_path))
    assert (incident.reason, incident.culprits) == ("IMBALANCE_STAGE", ())


def test_waiting_for_others_is_no_evidence_against_a_rank(tmp_path: pathlib.Path) -> None:
    rows = [
        {
            **row,
            "duration": 9.0
            if row["operation"] == "all_reduce" and row["rank"]
            else row["duration"],
        }
        for row in plain_rows()
    ]
    table = read_timings(written(rows, tmp_path))
    assert table.ignored_operations == ("all_reduce",)
    assert diagnose(table) == []


def test_the_order_of_the_rows_does_not_matter(tmp_path: pathlib.Path) -> None:
    rows = simulate_trace(TracePlan(slow_workers={(1, 2): 1.5}, steps=8))
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    names = [diagnose_timings(written(part, tmp_path))[0].culprit_ranks for part in (rows, mixed)]
    assert names[0] == names[1] == (9,)


def test_model_chunks_of_one_rank_are_kept_apart(tmp_path: pathlib.Path) -> None:
    rows = [
        {**row, "mc": chunk, "duration": row["duration"] * (1 + chunk)}
        for row in simulate_trace(TracePlan(steps=8, slow_workers={(2, 1): 1.4}))
        for chunk in range(2)
    ]
    table = read_timings(written(rows, tmp_path))
    assert "forward-compute of chunk 1" in table.work.operations
    assert [incident.culprit_ranks for incident in diagnose(table)] == [(6,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": None}, r"no column for 'rank' \(one of rank, global_rank\)"),
        ({"duration": "fast"}, "column 'duration' .* must hold numbers"),
        ({"step": ""}, "column for 'step' .* rows without a value"),
        ({"operation": "all_gather"}, "no compute operation; its operations are all_gather"),
    ],
)
def test_a_table_that_cannot_be_judged_is_refused(
    change: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    rows = [{k: v for k, v in {**row, **change}.items() if v is not None} for row in plain_rows()]
    with pytest.raises(ScoutError, match=message):
        read_timings(written(rows, tmp_path))


def test_files_that_are_no_tables_are_refused(tmp_path: pathlib.Path) -> None:
    for name, content, message in (
        ("a.txt", "x", r"known suffixes are \.parquet, \.csv"),
        ("b.parquet", "not parquet", "cannot be read as Parquet"),
        ("c.csv", "rank,step,operation,duration\n", "has no column|has no rows"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ScoutError, match=message):
            read_timings(tmp_path / name)
    with pytest.raises(ScoutError, match="does not exist"):
        read_timings(tmp_path / "missing.csv")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ScoutError, match="is empty"):
        TracePlan(replicas=0)


def test_the_map_shows_who_was_slow(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.csv"
    write_trace(simulate_trace(TracePlan(slow_workers={(1, 2): 1.7}, slow_from=12)), path)
    lines = render(path, tmp_path / "map.png").splitlines()
    (slow,) = [line for line in lines if line.startswith("rank 9 ")]
    assert slow == f"rank 9 (d1 p2)  |{'.' * 12}{'#' * 12}|"
    assert sum("#" in line for line in lines[1:-1]) == 1
    assert lines[0].endswith("steps 10 to 79")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_the_map_of_a_large_job_fits_a_terminal() -> None:
    ratio = np.ones((300, 400))
    ratio[250, :] = 2.5
    ratio[3] = np.nan
    ranks = tuple(range(300))
    drawn = to_text(Heat(ranks, ("",) * 300, tuple(range(400)), ratio), width=50).splitlines()
    assert max(map(len, drawn)) < 100
    assert len(drawn) == 64 + 3
    assert any(line == f"rank 250 |{'@' * 50}|" for line in drawn)
    assert drawn[-1] == "236 ranks with smaller ratios are not shown"


def test_the_map_is_written_as_png(tmp_path: pathlib.Path) -> None:
    shown = Heat((0, 7), ("", "node-b"), (3, 4, 9), np.array([[1.0, 1.0, 1.0], [2.0, np.nan, 2.0]]))
    to_png(shown, tmp_path / "map.png", marked=[7])
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ScoutError, match="cannot be written"):
        to_png(shown, tmp_path / "no folder" / "map.png")
