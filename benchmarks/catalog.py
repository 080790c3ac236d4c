"""How few shapes cover all expert shapes, whether the model is right, and what coverage costs.

    python -m benchmarks.catalog [--json] [--steps 1000] [--kernel-shapes 240] [--per-program]

Figures of the model (`scout_core.decision.schedule`) on 108 multiprocessors beside the published
ones; the model against the instrumented kernel on random shapes (where triton is installed); and
random heterogeneous routing, accounted for step by step.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scout_core.decision.catalog import Catalog, Observation, Shape, build_catalog
from scout_core.decision.path_coverage import PathCoverage
from scout_core.decision.schedule import GroupedGemm, Tile, uniform

PUBLISHED_SINGLE = "16 of 3457 (99.54 %), 1,134,224 executions"
PUBLISHED_GROUPED = "18 to 48 of 2048"
INTERVAL_STEPS = 20  # optimizer steps between two checks
LARGEST_ROWS = 2048
TEMPLATES = 2000  # of each routing

KERNELS: dict[str, GroupedGemm] = {
    "tile 32x128x64": GroupedGemm(128, 128),
    "tile 32x128x64, ceil slices": GroupedGemm(128, 128, even_slices=False),
    "tile 32x128x64, one slice": GroupedGemm(128, 128, max_slices=1),
    "tile 64x64x32": GroupedGemm(128, 128, tile=Tile(64, 64, 32)),
    "tile 128x128x32, weights too": GroupedGemm(
        128, 128, tile=Tile(128, 128, 32), weight_tile=Tile(128, 128, 32), even_slices=False
    ),
    "tile 16x128x64, ceil slices of 16": GroupedGemm(
        128, 128, tile=Tile(16, 128, 64), weight_tile=Tile(64, 64, 16), even_slices=False
    ),
}


def run(steps: int, kernel_shapes: int, per_program: bool) -> dict[str, Any]:
    """Measure everything; `steps` of each routing, `kernel_shapes` runs of the kernel."""
    return {
        "speed": [_speed(3457), _speed(100_000)],
        "compression": list(_compression(per_program)),
        "kernel": _against_kernel(kernel_shapes),
        "routing": list(_routing(steps)),
    }


def _speed(vectors: int) -> dict[str, float]:
    """Build from random vectors of 30 paths: hardly any is dominated, which is the worst case."""
    counts = np.random.default_rng(0).integers(0, 1000, (vectors, 30)).tolist()
    observations = [Observation(i, "F", tuple(row)) for i, row in enumerate(counts)]
    start = time.perf_counter()
    catalog = build_catalog(observations)
    seconds = time.perf_counter() - start
    return {"vectors": vectors, "representatives": len(catalog.representatives), "s": seconds}


def _compression(per_program: bool) -> Iterator[dict[str, Any]]:
    for (name, gemm), experts in itertools.product(KERNELS.items(), (0, 1, 2, 4, 8, 16)):
        last = LARGEST_ROWS if experts else 3457
        kernel = replace(gemm, experts=experts or 1)
        yield _compressed(name, kernel, last, False)
        if per_program and gemm is KERNELS["tile 32x128x64"]:
            yield _compressed(f"{name}, each program by itself", kernel, last, True)


def _compressed(name: str, gemm: GroupedGemm, last: int, per_program: bool) -> dict[str, Any]:
    start = time.perf_counter()
    catalog = build_catalog(
        gemm.observation(uniform(gemm.experts, rows), per_program=per_program)
        for rows in range(1, last + 1)
    )
    return {
        "kernel": name,
        "experts": gemm.experts,
        "shapes": last,
        "regimes": len(catalog.regimes),
        "representatives": len(catalog.representatives),
        "reduction": catalog.reduction,
        "path_executions": catalog.path_executions,
        "s": time.perf_counter() - start,
    }


def _against_kernel(shapes: int) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        return {"shapes": 0, "skipped": "triton is not installed"}
    from scout_core.lab.grouped_gemm import project, random_operands

    draw = np.random.default_rng(0)
    programs = branches = different = 0
    start = time.perf_counter()
    for i in range(shapes):
        gemm = _random_kernel(draw)
        shape = tuple(draw.integers(0, 14, gemm.experts).tolist())
        counters = project(gemm, shape, random_operands(gemm, shape, seed=i)).counters
        for launch in gemm.launches(shape):
            model = launch.program_counts()
            different += int((counters[launch.phase].numpy() != model).sum())
            programs += launch.programs
            branches += int(model.sum())
    return {
        "shapes": shapes,
        "programs": programs,
        "branches": branches,
        "different_counters": different,
        "s": time.perf_counter() - start,
    }


def _random_kernel(draw: np.random.Generator) -> GroupedGemm:
    """Draw small sizes: the interpreter takes milliseconds for one tile."""

    def one_of(*values: int) -> int:
        return int(draw.choice(values))

    return GroupedGemm(
        in_features=one_of(4, 6, 8, 12),
        out_features=one_of(4, 6, 8, 12),
        experts=one_of(1, 2, 3, 4),
        num_sms=one_of(2, 3, 5, 8),
        tile=Tile(one_of(4, 8), one_of(4, 8, 16), one_of(4, 8)),
        weight_tile=Tile(one_of(4, 8), one_of(4, 8, 16), one_of(2, 4)),
        max_slices=one_of(1, 2, 4),
        even_slices=bool(draw.integers(2)),
    )


def _routing(steps: int) -> Iterator[dict[str, Any]]:
    """Account for random routing, with the uniform catalogue and with one that has templates.

    Templates are random vectors that were admissible at the discovery as well; the vectors of the
    run are others.
    """
    for experts, templates in itertools.product((2, 4, 8, 16), (0, TEMPLATES)):
        draw = np.random.default_rng(0)
        gemm = GroupedGemm(128, 128, experts)
        shapes = dict.fromkeys(uniform(experts, rows) for rows in range(1, LARGEST_ROWS + 1))
        for routing in ROUTINGS.values():
            shapes.update(dict.fromkeys(routing(draw, experts) for _ in range(templates)))
        catalog = build_catalog(map(gemm.observation, shapes))
        for name, routing in ROUTINGS.items():
            vectors = [routing(draw, experts) for _ in range(steps)]
            row = {"experts": experts, "routing": name, "templates": len(ROUTINGS) * templates}
            yield row | _account(gemm, catalog, vectors)


def _uniform(draw: np.random.Generator, experts: int) -> Shape:
    """Each expert's rows anywhere in 0 .. 2048."""
    return tuple(draw.integers(0, LARGEST_ROWS + 1, experts).tolist())


def _zipf(draw: np.random.Generator, experts: int) -> Shape:
    """A random number of rows over experts of popularity 1, 1/2, 1/3, ... in random order."""
    popularity = draw.permutation(1 / np.arange(1, experts + 1))
    rows = experts * int(2 ** draw.uniform(4, 10))
    return tuple(draw.multinomial(rows, popularity / popularity.sum()).tolist())


ROUTINGS = {"uniform": _uniform, "zipf": _zipf}


def _account(gemm: GroupedGemm, catalog: Catalog, vectors: list[Shape]) -> dict[str, Any]:
    """Execute one vector a step; replay the whole queue every `INTERVAL_STEPS`."""
    coverage = PathCoverage(catalog, gemm.observation)
    steps, lookups_s, replays, uncovered = len(vectors), 0.0, 0, 0
    for step, vector in enumerate(vectors, 1):
        before = coverage.shares.queued
        start = time.perf_counter()
        coverage.on_step(step, [vector])
        lookups_s += time.perf_counter() - start
        uncovered += coverage.shares.queued > before
        if step % INTERVAL_STEPS == 0 or step == steps:
            for shape in coverage.queue:
                coverage.on_clean_replay(shape, step)
                replays += 1
    shares = coverage.shares
    return {
        "steps": steps,
        "representatives": len(catalog.representatives),
        "vectors_by_catalogue": 1 - uncovered / steps,
        "rows_by_catalogue": shares.catalogue / shares.executed,
        "rows_exact": shares.exact / shares.executed,
        "rows_not_yet": shares.not_yet / shares.executed,
        "replays_per_1000_steps": 1000 * replays / steps,
        "without_dominance": 1000 * uncovered / steps,
        "lookup_us": 1e6 * lookups_s / steps,
    }


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    for row in result["speed"]:
        console.print(
            f"{row['vectors']:,} random vectors of 30 paths: {row['representatives']:,} "
            f"representatives in {row['s']:.2f} s"
        )
    table = Table(title="128 x 128 projection on 108 SMs: row counts 1 .. shapes")
    headings = (
        "kernel",
        "experts",
        "shapes",
        "regimes",
        "repr.",
        "fewer",
        "executions",
        "published",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("kernel", "published") else "right")
    for row in result["compression"]:
        table.add_row(
            row["kernel"],
            *(str(row[key]) for key in ("experts", "shapes", "regimes", "representatives")),
            f"{row['reduction']:.2%}",
            f"{row['path_executions']:,}",
            _published(row),
        )
    console.print(table)
    _print_kernel(result["kernel"], console)
    _print_routing(result["routing"], console)


def _print_routing(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Heterogeneous routing, one vector a step, a check every {INTERVAL_STEPS}")
    columns = {
        "experts": "experts",
        "routing": "routing",
        "templates": "templates",
        "representatives": "repr.",
        "vectors_by_catalogue": "vectors by cat.",
        "rows_by_catalogue": "rows by cat.",
        "rows_exact": "exact",
        "rows_not_yet": "not yet",
        "replays_per_1000_steps": "replays/1000 steps",
        "without_dominance": "one by one",
        "lookup_us": "look-up us",
    }
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_cell(key, row[key]) for key in columns))
    console.print(table)


def _cell(key: str, value: str | float) -> str:
    if key.startswith(("vectors", "rows")):
        return f"{value:.1%}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _print_kernel(row: dict[str, Any], console: Console) -> None:
    if "skipped" in row:
        console.print(f"model against kernel: skipped, {row['skipped']}")
        return
    console.print(
        f"model against kernel: {row['shapes']} random shapes and settings, {row['programs']:,} "
        f"programs, {row['branches']:,} branches, {row['different_counters']} counters differ"
    )


def _published(row: dict[str, Any]) -> str:
    if row["shapes"] == 3457:
        return PUBLISHED_SINGLE
    return PUBLISHED_GROUPED if row["experts"] > 1 else "-"


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each routing")
    parser.add_argument("--kernel-shapes", type=int, default=240, help="runs of the kernel")
    parser.add_argument("--per-program", action="store_true", help="adds minutes")
    arguments = parser.parse_args()
    result = run(arguments.steps, arguments.kernel_shapes, arguments.per_program)
    if arguments.json:
        print(json.dumps({"schema": "scout.benchmark.catalog/1", **result}))
    else:
        print_report(result, Console())


if __name__ == "__main__":
    main()
