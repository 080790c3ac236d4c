"""`scout postmortem`: the verdict from what a job left behind."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from scout_core.cli import output
from scout_core.cli.output import Json, console, print_json
from scout_core.decision import hang
from scout_core.decision.incident import Incident
from scout_core.errors import ScoutError
from scout_core.evidence.post_mortem import Remains, load

TIMING_TABLES = (".parquet", ".csv")
SHOWN = 20
"""Rows of a table, or ranks of a list, that are printed at most; `--json` has all."""


def postmortem(
    path: Annotated[
        pathlib.Path,
        typer.Argument(help="Folder of dumps, snapshots and logs; or a timing table."),
    ],
    png: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write the heat map of a timing table (rank x step) here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Name who is at fault, from the files of a job that hung or was slow."""
    if path.is_file() and path.suffix in TIMING_TABLES:
        incidents = _slow_ranks(path, png, as_json)
    elif path.is_file():
        raise ScoutError(
            f"{path} is a file but no timing table ({', '.join(TIMING_TABLES)}); "
            "for dumps and logs give the folder that holds them"
        )
    else:
        remains = load(path)
        incidents = _hang(remains)
        _report(incidents, _inventory(remains), as_json)
    raise typer.Exit(output.exit_code(incidents))


def _slow_ranks(path: pathlib.Path, png: pathlib.Path | None, as_json: bool) -> list[Incident]:
    from scout_core.lab.timings import diagnose_timings, render

    incidents = list(diagnose_timings(path))
    _report(incidents, {}, as_json)
    if png is not None or not as_json:
        drawn = render(path, png)
        if not as_json:
            console.print(drawn, markup=False)
    return incidents


def _hang(remains: Remains) -> list[Incident]:
    diagnosis = hang.diagnose(remains.snapshots)
    if diagnosis.kind is hang.HangKind.NONE:
        return []
    moment = datetime.datetime.fromtimestamp(remains.newest_ns / 1e9, datetime.UTC)
    time = moment.isoformat(timespec="milliseconds") if remains.newest_ns else ""
    return [hang.to_incident(diagnosis, time=time)]


def _inventory(remains: Remains) -> dict[str, Any]:
    return {
        "files_used": remains.files_used,
        "skipped": [{"file": s.file, "why": s.why} for s in remains.skipped],
        "ranks_seen": [s.rank for s in remains.snapshots if not s.missing],
        "ranks_missing": [s.rank for s in remains.snapshots if s.missing],
    }


def _report(incidents: Sequence[Incident], inventory: dict[str, Any], as_json: bool) -> None:
    if as_json:
        records = [incident.to_json() for incident in incidents]
        print_json("postmortem", {"incidents": records, **inventory})
        return
    output.print_incidents(list(incidents))
    for incident in incidents:
        _print_details(incident)
    if inventory:
        _print_inventory(inventory)


def _print_details(incident: Incident) -> None:
    if incident.culprits:
        console.print(_culprits(incident))
    if incident.victims:
        console.print(f"only waiting: {_some(incident.victims)}")
    if incident.peer_group:
        console.print(f"group: {_some(incident.peer_group)}")
    for line in incident.evidence.get("cycle", ())[:SHOWN]:
        console.print(f"  {line}", markup=False)
    for camp in incident.evidence.get("camps", ())[:SHOWN]:
        site = f" at {camp['call_site']}" if camp["call_site"] else ""
        console.print(f"  {camp['operation']}{site}: {_some(camp['ranks'])}", markup=False)
    console.print(f"reason {incident.reason}, to do: {incident.action.value}")


def _culprits(incident: Incident) -> Table:
    table = Table(title="Culprits", title_justify="left")
    for name in ("rank", "host", "side", "what", "where"):
        table.add_column(name)
    findings = {found["rank"]: found for found in incident.evidence.get("findings", ())}
    for culprit in incident.culprits[:SHOWN]:
        found = findings.get(culprit.rank, {})
        what = found.get("explanation", culprit.module)
        row = (str(culprit.rank), culprit.host, found.get("side", ""), what, culprit.where)
        table.add_row(*map(escape, row))
    return table


def _print_inventory(inventory: dict[str, Any]) -> None:
    seen, missing = inventory["ranks_seen"], inventory["ranks_missing"]
    console.print(f"{inventory['files_used']} files used, {len(seen)} ranks seen")
    if missing:
        console.print(f"no evidence of ranks {_some(missing)}")
    for skipped in inventory["skipped"][:SHOWN]:
        console.print(f"skipped {skipped['file']}: {skipped['why']}", markup=False)
    if len(inventory["skipped"]) > SHOWN:
        console.print(f"... and {len(inventory['skipped']) - SHOWN} more files")


def _some(ranks: Sequence[int]) -> str:
    more = f" ... ({len(ranks)} ranks)" if len(ranks) > SHOWN else ""
    return " ".join(str(rank) for rank in ranks[:SHOWN]) + more
