"""`scout simulate`: how often straggler rules are wrong, and how fast they are right."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from scout_core.cli.output import Json, console, log, print_json
from scout_core.errors import ScoutError
from scout_core.lab.simulate import NOISES, RULES, WITHIN, Figures, Noise, NoiseKind, measure


def simulate(
    peers: Annotated[int, typer.Option(help="Ranks of the peer group.")] = 8,
    noise: Annotated[str, typer.Option(help=f"Kind of noise: {', '.join(NOISES)}.")] = "gauss",
    scatter: Annotated[float, typer.Option(help="Standard deviation of log time.")] = 0.02,
    slowdowns: Annotated[str, typer.Option(help="Slow-downs to find, in percent.")] = "5,10,20,50",
    checks: Annotated[int, typer.Option(help="Clean checks that are judged.")] = 5000,
    trials: Annotated[int, typer.Option(help="Slow ranks per slow-down.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate timings of one peer group and compare SCOUT's rule with two simpler ones."""
    setting = Noise(_kind(noise), scatter)
    percents = _percents(slowdowns)
    rules = track(RULES, "simulating", console=log, transient=True, disable=as_json)
    figures = [
        measure(rule, peers, setting, checks=checks, trials=trials, slowdowns=percents, seed=seed)
        for rule in rules
    ]
    if as_json:
        print_json("simulate", {"rows": [row.to_json() for row in figures]})
        return
    console.print(_table(figures))


def _kind(name: str) -> NoiseKind:
    for kind in NOISES:
        if kind == name:
            return kind
    raise ScoutError(f"--noise {name!r} is unknown; use one of {', '.join(NOISES)}")


def _percents(text: str) -> tuple[float, ...]:
    """Read "5,10" as fractions.

    Raises:
        ScoutError: a part is not a number above 0.
    """
    try:
        fractions = tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        fractions = ()
    if not fractions or not all(0 < fraction < float("inf") for fraction in fractions):
        raise ScoutError(f"--slowdowns {text!r} must be percentages above 0, as in 5,10,20")
    return fractions


def _table(figures: list[Figures]) -> Table:
    first = figures[0]
    table = Table(
        title=f"{first.peers} peers, {first.noise} noise of {first.scatter:.1%}",
        title_justify="left",
    )
    table.add_column("rule")
    table.caption = (
        f"+N%: trials that name exactly the slow rank within {WITHIN[0]} / {WITHIN[1]} checks"
    )
    table.caption_justify = "left"
    table.add_column("false alarms per check")
    for slowdown in first.found:
        table.add_column(f"+{slowdown:.0%}")
    table.add_column("innocents named")
    for row in figures:
        found = [" / ".join(f"{by[n]:.0%}" for n in WITHIN) for by in row.found.values()]
        table.add_row(row.rule, f"{row.false_positives:.2g}", *found, f"{row.innocent:.1%}")
    return table
