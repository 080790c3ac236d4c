"""What every command shares: `--json`, exit codes, one-line errors."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from scout_core.decision.incident import Incident

FOUND_NOTHING = 0
INTERNAL_ERROR = 1
BAD_USAGE = 2
FOUND_FAULT = 3
NO_TRUSTWORTHY_CHECKPOINT = 4

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

console = Console(highlight=False)
"""Results. With `--json` nothing but the object may be printed on it."""
log = Console(stderr=True, highlight=False)
"""Progress and remarks."""


def print_json(command: str, payload: dict[str, Any]) -> None:
    """Print the one JSON object of a command, with schema "scout.<command>/1"."""
    sys.stdout.write(json.dumps({"schema": f"scout.{command}/1", **payload}) + "\n")


def print_incidents(incidents: list[Incident]) -> None:
    """Print one sentence per incident, or say that there is none."""
    for incident in incidents:
        console.print(f"{incident.kind.value}: {incident.message}", markup=False)
    if not incidents:
        console.print("no fault found")


def exit_code(incidents: list[Incident]) -> int:
    """0 when nothing was found, 3 when a fault was."""
    return FOUND_FAULT if incidents else FOUND_NOTHING
