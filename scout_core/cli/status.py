"""`scout status`: what every rank of a running job is doing right now."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from scout_core.cli.output import FOUND_FAULT, FOUND_NOTHING, Json, console, print_json
from scout_core.errors import ScoutError

ANSWER_TIMEOUT_S: Final = 5.0


def status(
    run_dir: Annotated[pathlib.Path, typer.Argument(help="Folder of the run.")],
    watch_s: Annotated[float, typer.Option(help="Repeat every so many seconds; 0: once.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Show a table of every rank's coordinate, phase, pending collective and age."""
    while True:
        found = ask(run_dir)
        incidents = [found["incident"]] if found["incident"] else []
        if as_json:
            print_json("status", {"ranks": found["ranks"], "incidents": incidents})
        else:
            console.print(_table(found["ranks"]))
            for incident in incidents:
                console.print(incident["message"], markup=False)
        if watch_s <= 0:
            raise typer.Exit(FOUND_FAULT if incidents else FOUND_NOTHING)
        time.sleep(watch_s)


def ask(run_dir: pathlib.Path, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """Ask the hubs of a run, the leading one first, for the state of the job.

    Returns:
        "ranks": one row per rank; "incident": the open incident, or None.

    Raises:
        ScoutError: there is no hub, or none answers.
    """
    places = sorted(run_dir.glob("observer-*.json"))
    if not places:
        raise ScoutError(
            f"{run_dir} has no observer: the job has ended, runs without hang.enabled, or its "
            "hub's node writes to another disk; run `scout status` there"
        )
    for place in places:
        found = _ask(json.loads(place.read_text()), timeout_s / len(places))
        if found is not None:
            return found
    raise ScoutError(
        f"no observer of {run_dir} answers within {timeout_s:.0f} s; the job was killed, or its "
        "hub cannot be reached from this machine"
    )


def _ask(place: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    import zmq

    from scout_core.observer.wire import Keys, Link

    context: zmq.Context[Any] = zmq.Context()
    link = Link(
        context,
        place["endpoint"],
        place["public_key"],
        name=f"status-{time.monotonic_ns()}",
        keys=Keys(**place["visitor"]),
        beat_s=timeout_s,
    )
    link.send({"t": "status"})
    try:
        if link.socket.poll(1000 * timeout_s):
            return next(link.receive(), None)
        return None
    finally:
        context.destroy(linger=0)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("rank", "host", "coordinate", "state", "phase", "step", "waits in", "silent"):
        table.add_column(name)
    for row in rows:
        silent = "" if row["silent_s"] is None else f"{row['silent_s']:.1f} s"
        table.add_row(
            str(row["rank"]),
            escape(row["host"]),
            _coordinate(row["coordinate"]),
            row["state"],
            escape(row["missing"]) or ("step" if row["phase"] == "unknown" else row["phase"]),
            str(row["step"]),
            escape(_pending(row["pending"])),
            silent,
            style="bold red" if row["late"] else None,
        )
    return table


def _coordinate(place: dict[str, int] | None) -> str:
    return "" if place is None else " ".join(f"{axis}{i}" for axis, i in place.items())


def _pending(pending: dict[str, Any] | None) -> str:
    if pending is None:
        return ""
    where = f"{pending['operation']} #{pending['sequence']} of {pending['group']}"
    return f"{where} for {pending['age_s']:.1f} s, {pending['call_site']}"
