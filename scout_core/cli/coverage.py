"""`scout coverage`: who the peers of each rank are, and what that allows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from scout_core.cli.output import Json, console, print_json
from scout_core.decision.topology import AXES, GroupCoverage, Topology
from scout_core.errors import ScoutError


def coverage(
    degrees: Annotated[str, typer.Option(help="Degree of each axis, as d=4,t=2.")],
    order: Annotated[str, typer.Option(help="Axis letters, outermost first.")] = AXES,
    hosts: Annotated[int | None, typer.Option(help="Ranks per host.")] = None,
    as_json: Json = False,
) -> None:
    """Show the peer groups of a job and what each can do: attribute, detect or nothing."""
    topology = Topology.from_degrees(order=order, hosts=hosts, **parse_degrees(degrees))
    found = topology.coverage()
    if as_json:
        groups = [asdict(group) for group in found.groups]
        state = [asdict(group) for group in found.state_groups]
        payload = {"world_size": topology.world_size, "groups": groups, "state_groups": state}
        print_json("coverage", payload)
        return
    console.print(_table("Replay: compute, gathered parameters, time", found.groups))
    console.print(_table("State audit: parameters and optimizer state at rest", found.state_groups))


def parse_degrees(text: str) -> dict[str, int]:
    """Read "d=4,t=2".

    Raises:
        ScoutError: a part is not letter=integer, or an axis is unknown or given twice.
    """
    degrees: dict[str, int] = {}
    for part in text.split(","):
        axis, _, value = part.strip().partition("=")
        if not value.isdecimal():
            raise ScoutError(f"--degrees part {part!r} must be AXIS=NUMBER, as in d=4,t=2")
        if axis not in tuple(AXES):
            raise ScoutError(
                f"--degrees {text!r}: there is no axis {axis!r}; the axes are {', '.join(AXES)}"
            )
        if axis in degrees:
            raise ScoutError(f"--degrees {text!r} gives axis {axis!r} twice; give it once")
        degrees[axis] = int(value)
    return degrees


def _table(title: str, groups: tuple[GroupCoverage, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("layout", "ranks", "kind", "can", "why"):
        table.add_column(name)
    for group in groups:
        ranks = " ".join(str(rank) for rank in group.ranks)
        table.add_row(group.layout, ranks, group.kind, group.can, group.why)
    return table
