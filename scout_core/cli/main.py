"""Entry point of the `scout` command. Each subcommand lives in a module of its own.

Modules that need torch or matplotlib import them inside their functions, so that `scout --help`
and the offline commands start at once.
"""

from __future__ import annotations

import sys

import typer

from scout_core.cli import (
    campaign,
    catalog,
    ckpt,
    coverage,
    demo,
    drill,
    output,
    plan,
    postmortem,
    simulate,
    status,
)
from scout_core.errors import ScoutError

app = typer.Typer(
    name="scout",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Which rank is at fault, and which checkpoint can be trusted."""


app.command("coverage")(coverage.coverage)
app.command("demo")(demo.demo)
app.command("drill")(drill.drill)
app.command("campaign")(campaign.campaign)
app.add_typer(catalog.app)
app.add_typer(ckpt.app)
app.command("plan")(plan.plan)
app.command("postmortem")(postmortem.postmortem)
app.command("simulate")(simulate.simulate)
app.command("status")(status.status)


def main() -> None:
    """Run `scout`; a mistake of the user is one line on stderr and exit code 2."""
    try:
        app()
    except ScoutError as error:
        print(f"scout: {error}", file=sys.stderr)
        sys.exit(output.BAD_USAGE)
