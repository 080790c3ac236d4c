"""`scout drill` and `scout demo`: break a small real job on purpose and see who is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from scout_core.cli.output import FOUND_FAULT, Json, console, log, print_json

if TYPE_CHECKING:
    from scout_core.lab.drill import DrillOutcome, DrillPlan


def drill(
    parallelism: Annotated[
        str, typer.Option(help="ddp, fsdp2, hsdp, hsdp_tp, pp_fsdp or moe.")
    ] = "ddp",
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="KIND[:rank=..,layer=..,step=..,rows=..,...]; repeat it for more."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws whatever the faults leave open.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: enough.")] = None,
    interval: Annotated[
        int | None, typer.Option(help="Optimizer steps between two checks; default: 2 or 1.")
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Ranks per simulated host.")] = None,
    as_json: Json = False,
) -> None:
    """Train, inject faults, and compare what SCOUT reports with what was injected."""
    plan = make_plan(parallelism, ranks, fault or [], seed, steps, interval, hosts)
    from scout_core.lab.drill import run_drill

    log.print(f"drill: {plan.steps} steps of {parallelism} on {ranks} processes", markup=False)
    outcome = run_drill(plan)
    if as_json:
        print_json("drill", payload(outcome))
    else:
        show(outcome)
    if not outcome.passed:
        raise typer.Exit(FOUND_FAULT)


def make_plan(
    parallelism: str,
    ranks: int,
    faults: list[str],
    seed: int = 0,
    steps: int | None = None,
    interval: int | None = None,
    hosts: int | None = None,
) -> DrillPlan:
    """Check the options and draw what they leave open.

    Raises:
        ScoutError: an option that cannot be used, with the way out.
    """
    from scout_core.errors import ScoutError
    from scout_core.lab.drill import (
        LEARNS,
        DrillPlan,
        draw_fault,
        layers_per_rank,
        steps_needed,
    )
    from scout_core.lab.faults import parse_fault
    from scout_core.lab.model import GPTConfig
    from scout_core.lab.parallel import Parallelism

    names = [each.value for each in Parallelism]
    if parallelism not in names:
        raise ScoutError(f"--parallelism {parallelism!r} must be one of {', '.join(names)}")
    for option, value in (("--interval", interval), ("--steps", steps), ("--hosts", hosts)):
        if value is not None and value < 1:
            raise ScoutError(f"{option} {value} must be >= 1")
    if len(faults) > ranks:
        raise ScoutError(f"{len(faults)} faults need as many ranks, but --ranks is {ranks}")
    layers = layers_per_rank(Parallelism(parallelism), GPTConfig())
    drawn = []
    for i, text in enumerate(faults):
        kind, fixed = parse_fault(text)
        drawn.append(draw_fault(kind, ranks, layers, seed + 7919 * i, **fixed))
    if interval is None:
        interval = 1 if any(each.kind in LEARNS for each in drawn) else 2
    return DrillPlan(
        Parallelism(parallelism),
        ranks,
        tuple(drawn),
        steps or steps_needed(drawn, interval, layers),
        interval,
        seed,
        ranks_per_host=hosts,
    )


def payload(outcome: DrillOutcome) -> dict[str, object]:
    """The JSON object of a drill."""
    return {
        "injected": outcome.injected,
        "missed": outcome.missed,
        "false": outcome.false,
        "incidents": [incident.to_json() for incident in outcome.incidents],
        "coverage": outcome.coverage,
        "loss": outcome.loss,
        "overhead": outcome.overhead,
    }


def show(outcome: DrillOutcome) -> None:
    """Print the table of a drill."""
    if outcome.injected:
        console.print(_fault_table(outcome))
    for incident in outcome.incidents:
        console.print(f"{incident.kind.value}: {incident.message}", markup=False)
    for wrong in outcome.false:
        console.print(f"FALSE: {wrong['message']}", markup=False)
    if outcome.overhead:
        cost = outcome.overhead
        console.print(
            f"a check costs {cost['check_s'] / cost['step_s']:.2f} steps: "
            f"{cost['measured']:.1%} of training measured, {cost['model']:.1%} by V/(I*N)"
        )
    verdict = "NOT as injected"
    if outcome.passed:
        verdict = "every fault named, nobody else" if outcome.injected else "no fault, no incident"
    console.print(f"{verdict}; loss {outcome.loss[0]:.2f} -> {outcome.loss[-1]:.2f}")


def _fault_table(outcome: DrillOutcome) -> Table:
    table = Table(title="Injected faults", title_justify="left")
    for name in ("kind", "rank", "layer", "surface", "magnitude", "step", "found", "latency"):
        table.add_column(name)
    for row in outcome.injected:
        latency = "-" if row["latency_steps"] is None else f"{row['latency_steps']} steps"
        cells = [row[name] for name in ("kind", "rank", "layer", "surface", "magnitude", "step")]
        table.add_row(*map(str, cells), "yes" if row["found"] else "NO", latency)
    return table
