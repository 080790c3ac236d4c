"""`scout plan`: what checking costs and how soon a fault is seen, by model and by measurement."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from scout_core.cli.output import Json, console, log, print_json
from scout_core.decision.cost import Plan, cost_of
from scout_core.errors import ScoutError


def plan(
    layers: Annotated[int, typer.Option(help="Repeated hidden layers N.")],
    interval: Annotated[int, typer.Option(help="Optimizer steps between two checks I.")] = 20,
    variants: Annotated[int, typer.Option(help="Replays of one check V.")] = 7,
    step_seconds: Annotated[float, typer.Option(help="Seconds of one training step.")] = 1.0,
    measure: Annotated[bool, typer.Option(help="Run a drill and print it beside.")] = True,
    as_json: Json = False,
) -> None:
    """Show the cost model V/(I*N), the expected latency and, beside it, what a drill measured."""
    expected = cost_of(Plan(layers, interval, variants, step_seconds))
    measured = _measured() if measure else {}
    if as_json:
        print_json("plan", {**expected._asdict(), "drill": measured})
        return
    table = Table("", "this plan", *(["drill, model", "drill, measured"] if measured else []))
    rows = [
        ("overhead V/(I*N)", f"{expected.overhead:.2%}", "model", "measured"),
        ("one check, in steps", f"{expected.check_steps:.3f}", "check_model", "check_measured"),
        ("fault of a rank seen after", f"{expected.rank_latency_s:.0f} s", None, None),
        ("fault of one layer seen after", f"{expected.layer_latency_s:.0f} s", None, None),
    ]
    for title, value, *keys in rows:
        cells = [f"{measured[key]:.3f}" if key else "" for key in keys] if measured else []
        table.add_row(title, value, *cells)
    console.print(table)


def _measured() -> dict[str, float]:
    """Cost of a small drill on this machine, beside the model's figure for the same drill."""
    from scout_core.lab.drill import DrillPlan, run_drill
    from scout_core.lab.parallel import Parallelism

    log.print("measuring: a drill of 24 steps on 4 processes ...")
    drill = DrillPlan(Parallelism.DDP, 4, (), steps=24, interval_steps=2)
    cost = run_drill(drill).overhead
    if not cost:
        raise ScoutError("the drill measured nothing; use --no-measure")
    return {
        "model": cost["model"],
        "measured": cost["measured"],
        "check_model": cost["model"] * drill.interval_steps,
        "check_measured": cost["check_s"] / cost["step_s"],
    }
