"""`scout campaign`: hundreds of random corruptions, each named or missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.table import Table

from scout_core.cli.output import FOUND_FAULT, Json, console, log, print_json
from scout_core.errors import ScoutError

if TYPE_CHECKING:
    from scout_core.lab.campaign import CampaignPlan

LAYOUTS = ("ddp:4", "ddp:8", "fsdp2:4", "fsdp2:8", "hsdp:4", "hsdp:8")


def campaign(
    injections: Annotated[int, typer.Option(help="Injections per layout.")] = 60,
    layout: Annotated[
        list[str] | None, typer.Option(help="PARALLELISM:RANKS; repeat it. Default: six.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws rank, layer, surface and magnitude.")] = 0,
    as_json: Json = False,
) -> None:
    """Inject corruptions at random places and count which rank is named."""
    from scout_core.lab.campaign import run_campaign

    plans = [make_plan(text, injections, seed + i) for i, text in enumerate(layout or LAYOUTS)]
    results = {}
    for plan in track(plans, description="layouts", console=log, disable=not log.is_terminal):
        name = f"{plan.parallelism.value}:{plan.ranks}"
        results[name] = run_campaign(plan).summary()
    passed = all(not row["missed"] and not row["false"] for row in results.values())
    if as_json:
        print_json("campaign", {"passed": passed, "layouts": results})
    else:
        show(results)
    if not passed:
        raise typer.Exit(FOUND_FAULT)


def make_plan(text: str, injections: int, seed: int) -> CampaignPlan:
    """Read "ddp:4".

    Raises:
        ScoutError: not a layout, or no injections.
    """
    from scout_core.lab.campaign import CampaignPlan
    from scout_core.lab.parallel import Parallelism, degrees

    kind, _, ranks = text.partition(":")
    names = [each.value for each in Parallelism]
    if kind not in names or not ranks.isdigit():
        raise ScoutError(f"--layout {text!r} must be KIND:RANKS with KIND of {', '.join(names)}")
    if injections < 1:
        raise ScoutError(f"--injections {injections} must be >= 1")
    degrees(Parallelism(kind), int(ranks))
    few = (injections + 4) // 5  # a fifth are near-invisible: one low mantissa bit
    return CampaignPlan(Parallelism(kind), int(ranks), injections, seed, min_low_bit=few)


def show(results: dict[str, dict[str, object]]) -> None:
    """Print one line per layout."""
    table = Table(title="Injected corruptions", title_justify="left")
    columns = ("injections", "right", "low_bit", "clean_checks", "false", "mean_checks")
    for name in ("layout", *columns):
        table.add_column(name)
    for layout, row in results.items():
        cells = [f"{row[c]:.1f}" if c == "mean_checks" else str(row[c]) for c in columns]
        table.add_row(layout, *cells)
    console.print(table)
