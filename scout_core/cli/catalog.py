"""`scout catalog`: find, show, check and compare the execution-path catalogues of experts."""

from __future__ import annotations

import pathlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.progress import Progress
from rich.table import Table

from scout_core.cli import catalog_options as options
from scout_core.cli.output import FOUND_FAULT, Json, console, log, print_json
from scout_core.decision.catalog import MIN_REPEATS, Catalog, Shape, name_of
from scout_core.decision.catalog_file import CatalogFile, exact_shapes
from scout_core.decision.environment import Environment, OnDrift, differences, rely_on
from scout_core.decision.schedule import GroupedGemm
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import Journal, read_catalog, write_catalog

if TYPE_CHECKING:
    from scout_core.evidence.kernel_profile import Profiler
    from scout_core.lab.discovery import Plan

app = typer.Typer(name="catalog", no_args_is_help=True, help=__doc__)

File = Annotated[pathlib.Path, typer.Argument(help="Catalogue file.")]
Overrides = Annotated[
    pathlib.Path | None, typer.Option(help="JSON fields that replace those read here.")
]
_PLOT_COLUMNS = 64
_PLOT_ROWS = 48
_MOST_NAMED = 8


@app.command("build")
def build(
    out: Annotated[pathlib.Path, typer.Option(help="Catalogue file to write.")],
    in_features: Annotated[int, typer.Option(help="Input features of the projection.")],
    out_features: Annotated[int, typer.Option(help="Output features of the projection.")],
    experts: Annotated[int, typer.Option(help="Experts of one grouped kernel.")] = 1,
    rows: Annotated[str, typer.Option(help="Rows of each expert, FIRST:LAST[:STEP].")] = "1:2048",
    vectors: Annotated[
        pathlib.Path | None, typer.Option(help="JSON list of row vectors, admissible as well.")
    ] = None,
    source: Annotated[
        options.Source, typer.Option(help="Who observes the shapes.")
    ] = options.Source.MODEL,
    sms: Annotated[int | None, typer.Option(help="Multiprocessors; default: this GPU's.")] = None,
    tile: Annotated[str, typer.Option(help="Rows x columns x reduction.")] = "32x128x64",
    weight_tile: Annotated[str, typer.Option(help="The same, weight gradient.")] = "64x64x32",
    max_slices: Annotated[int, typer.Option(help="Parts of a weight gradient's reduction.")] = 16,
    repeats: Annotated[int, typer.Option(help="Observations of each shape.")] = MIN_REPEATS,
    dtype: Annotated[str, typer.Option(help="Of the operands.")] = "float32",
    degrees: Annotated[str, typer.Option(help="Parallel degrees, as d=4,e=2.")] = "d=1",
    environment: Overrides = None,
    per_program: Annotated[
        bool, typer.Option(help="Cover every multiprocessor by itself (model only).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Observe every admissible shape and write the smallest catalogue that covers them.

    Interrupted, it goes on where it stopped when it is called again.
    """
    from scout_core.lab.discovery import Plan

    here = options.fields_here(environment)
    gemm = GroupedGemm(
        in_features,
        out_features,
        experts,
        int(sms or here["num_sms"]),
        options.parse_tile("--tile", tile),
        options.parse_tile("--weight-tile", weight_tile),
        max_slices,
    )
    span = options.parse_rows(rows)
    profiler, kernel = options.make_profiler(source, gemm, dtype, per_program)
    fields: dict[str, Any] = {
        "in_features": in_features,
        "out_features": out_features,
        "local_experts": experts,
        "row_alignment": span.step,
        "degrees": degrees,
    }
    found_in = Environment.from_json(
        {**fields, **kernel, **here, "num_sms": gemm.num_sms}, str(environment or "this machine")
    )
    plan = Plan(options.admissible(experts, span, vectors), found_in, repeats)
    _report("build", _discover(out, plan, profiler), out, as_json)


@app.command("show")
def show(file: File, as_json: Json = False) -> None:
    """Show the environment, the regimes, and which representative covers which shapes."""
    found = read_catalog(file)
    if not as_json:
        for name, value in found.environment.to_json().items():
            console.print(f"{name}: {value}", markup=False)
    _report("show", found, file, as_json)
    if not as_json:
        for line in plot(found.catalog):
            console.print(line, markup=False, no_wrap=True)


@app.command("check")
def check(
    file: File,
    environment: Overrides = None,
    on_drift: Annotated[str, typer.Option(help="exact or not_covered.")] = "exact",
    as_json: Json = False,
) -> None:
    """Check a file and its proof, and compare its environment with this machine's.

    Exit code 3 when the environment differs, so that the catalogue may not be used here.
    """
    if on_drift not in get_args(OnDrift):
        raise ScoutError(f"--on-drift {on_drift!r} must be one of {', '.join(get_args(OnDrift))}")
    found = read_catalog(file)
    found.refuse_larger_than_needed(str(file))
    live = options.live_environment(found.environment, environment)
    decision = rely_on(found.environment, live, cast("OnDrift", on_drift))
    if as_json:
        changes = [each._asdict() for each in decision.differences]
        payload = {"reliance": decision.reliance.value, "differences": changes}
        print_json("catalog", {"command": "check", **payload, "message": decision.message})
    else:
        console.print(decision.message, markup=False)
    if decision.differences:
        raise typer.Exit(FOUND_FAULT)


@app.command("diff")
def diff(old: File, new: File, as_json: Json = False) -> None:
    """Compare two catalogues: environment, admissible shapes, representatives.

    Exit code 3 when they differ.
    """
    before, after = read_catalog(old), read_catalog(new)
    changes = differences(before.environment, after.environment)
    sets = _set_changes(before.catalog, after.catalog)
    if as_json:
        fields = [each._asdict() for each in changes]
        print_json("catalog", {"command": "diff", "environment": fields, **sets})
    else:
        for change in changes:
            line = f"{change.field}: {change.stored!r} -> {change.live!r}"
            console.print(line, markup=False)
        for what, shapes in sets.items():
            if shapes:
                console.print(f"{what}: {len(shapes)} ({_some(shapes)})", markup=False)
    if changes or any(sets.values()):
        raise typer.Exit(FOUND_FAULT)
    log.print("no difference")


def plot(catalog: Catalog) -> list[str]:
    """Draw which representative covers which shapes: shapes to the right, representatives up.

    A cell is drawn when one of its shapes is assigned to the representative of the line.
    """
    shapes, representatives = catalog.shapes, catalog.representatives[-_PLOT_ROWS:]
    columns = min(_PLOT_COLUMNS, len(shapes))
    grid = {shape: [" "] * columns for shape in representatives}
    for i, shape in enumerate(shapes):
        owner = catalog.representative_of(shape)
        if owner in grid:
            grid[owner][i * columns // len(shapes)] = "#"
    width = max(len(name_of(shape)) for shape in representatives)
    lines = [f"{name_of(shape):>{width}} |{''.join(grid[shape])}" for shape in grid]
    lines.reverse()
    left_out = len(catalog.representatives) - len(representatives)
    if left_out:
        lines.append(f"({left_out} representatives of smaller shapes are not drawn)")
    first, last = name_of(shapes[0]), name_of(shapes[-1])
    axis = f"{first}{last:>{max(columns - len(first), len(last) + 1)}}"
    return [*lines, f"{'':{width}} +{'-' * columns}", f"{'':{width}}  {axis}"]


def _discover(out: pathlib.Path, plan: Plan, profiler: Profiler) -> CatalogFile:
    """Observe with a progress bar; what was observed survives an interruption."""
    from scout_core.lab.discovery import discover

    journal_path = out.with_name(f"{out.name}.journal")
    with (
        Journal(journal_path, f"{profiler.name} {plan.key}") as journal,
        Progress(console=log, transient=True) as progress,
    ):
        task = progress.add_task("observing shapes", total=len(plan.shapes) * plan.repeats)
        found = discover(plan, profiler, journal, lambda n: progress.advance(task, n))
        write_catalog(out, found)
        journal.remove()
    return found


def _report(command: str, file: CatalogFile, path: pathlib.Path, as_json: bool) -> None:
    catalog = file.catalog
    if as_json:
        print_json("catalog", {"command": command, **_payload(file, path)})
        return
    exact = set(exact_shapes(catalog))
    regimes = [regime for regime in catalog.regimes if not exact.issuperset(regime.shapes)]
    table = Table(title="Regimes", title_justify="left")
    for name in ("fingerprint", "shapes", "representatives"):
        table.add_column(name, overflow="fold")
    for regime in regimes:
        table.add_row(
            str(regime.fingerprint), str(len(regime.shapes)), _some(regime.representatives)
        )
    console.print(table)
    for reason, count in file.discovery.unseen.items():
        console.print(f"{count} shapes are replayed themselves: {reason}", markup=False)
    console.print(
        f"{len(catalog.representatives)} representatives cover {len(catalog.shapes)} shapes "
        f"({100 * catalog.reduction:.2f} % fewer) and {catalog.path_executions:,} path executions",
        markup=False,
    )
    console.print(str(file.discovery), markup=False)
    if command == "build":
        log.print(f"written to {path}", markup=False)


def _payload(file: CatalogFile, path: pathlib.Path) -> dict[str, Any]:
    catalog = file.catalog
    return {
        "file": str(path),
        "environment": file.environment.to_json(),
        "discovery": asdict(file.discovery),
        "regimes": [
            {
                "fingerprint": regime.fingerprint,
                "shapes": len(regime.shapes),
                "representatives": regime.representatives,
            }
            for regime in catalog.regimes
        ],
        "shapes": len(catalog.shapes),
        "exact_shapes": len(exact_shapes(catalog)),
        "representatives": catalog.representatives,
        "reduction": catalog.reduction,
        "path_executions": catalog.path_executions,
    }


def _set_changes(before: Catalog, after: Catalog) -> dict[str, tuple[Shape, ...]]:
    changes: dict[str, tuple[Shape, ...]] = {}
    for what in ("shapes", "representatives"):
        was, now = getattr(before, what), getattr(after, what)
        kept = set(was) & set(now)
        changes[f"{what}_removed"] = tuple(shape for shape in was if shape not in kept)
        changes[f"{what}_added"] = tuple(shape for shape in now if shape not in kept)
    return changes


def _some(shapes: tuple[Shape, ...]) -> str:
    more = len(shapes) - _MOST_NAMED
    named = ", ".join(name_of(shape) for shape in shapes[:_MOST_NAMED])
    return f"{named} and {more} more" if more > 0 else named
