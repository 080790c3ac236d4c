"""`scout demo`: what SCOUT does, in two minutes, on this machine."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from scout_core.cli.drill import make_plan, payload, show
from scout_core.cli.output import FOUND_FAULT, Json, console, log, print_json


class Act(NamedTuple):
    """One part of the demo."""

    title: str
    parallelism: str
    faults: tuple[str, ...]


ACTS = (
    Act("a healthy job: SCOUT is silent", "ddp", ()),
    Act(
        "one rank's layer flips the lowest mantissa bit of its output, another rank is 30 % slower",
        "ddp",
        ("sdc:rank=2,layer=1,magnitude=low_bit,step=4", "straggler:rank=3,percent=30,step=4"),
    ),
    Act(
        "a weight flips at rest on one replica, in a layer that is not being replayed",
        "ddp",
        ("sdc:surface=parameter,magnitude=low_bit",),
    ),
    Act("the gradient of one FSDP2 rank is corrupted in a backward pass", "fsdp2", ("gradient",)),
    Act("one rank stops in the middle of a layer; the others wait for it", "ddp", ("hang",)),
)


def demo(
    seed: Annotated[int, typer.Option(help="Draws what the acts leave open.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a small language model on 4 processes, break it five ways, and name who did it."""
    from scout_core.lab.drill import run_drill

    results = []
    for number, act in enumerate(ACTS, start=1):
        log.rule(f"{number}/{len(ACTS)} {act.title}")
        plan = make_plan(act.parallelism, 4, list(act.faults), seed + number)
        outcome = run_drill(plan)
        results.append(outcome)
        if not as_json:
            show(outcome)
    passed = all(outcome.passed for outcome in results)
    if as_json:
        acts = [
            {"title": act.title, **payload(outcome)}
            for act, outcome in zip(ACTS, results, strict=True)
        ]
        print_json("demo", {"passed": passed, "acts": acts})
    elif passed:
        console.print("Every fault was named, and nobody else. Next: README.md, your own script.")
    if not passed:
        raise typer.Exit(FOUND_FAULT)
