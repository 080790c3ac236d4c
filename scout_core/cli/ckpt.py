"""`scout ckpt`: what is known about checkpoints, which one to start from, and what to do about it.

Works on the trust record alone: no torch, no job; files are only ever read as bytes.
"""

from __future__ import annotations

import pathlib
import shutil
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table

from scout_core.cli import output
from scout_core.cli.output import Json, console, log, print_json
from scout_core.decision import trust
from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Choice, Failure, Label, word
from scout_core.decision.trust import Entry, Record
from scout_core.errors import ScoutError
from scout_core.integration import manifest
from scout_core.integration.rebuild import rebuild as rebuild_record
from scout_core.integration.trust_record import TrustStore

app = typer.Typer(name="ckpt", no_args_is_help=True, help="Checkpoints: list, select, verify, ...")

Folder = Annotated[pathlib.Path, typer.Argument(help="Folder that holds scout_trust.json.")]
Which = Annotated[str, typer.Argument(help="Step, or name of the checkpoint's folder.")]
Quick = Annotated[bool, typer.Option("--quick", help="Compare sizes only, do not read the files.")]


@app.command("list")
def list_(folder: Folder, as_json: Json = False) -> None:
    """Show every checkpoint with its label."""
    store = TrustStore(folder)
    record = store.load()
    if as_json:
        rows = [_row(store, entry) for entry in record.checkpoints]
        head = {"job": record.job, "failure": record.failure.value, "updated": record.updated}
        _print("list", folder, {**head, "gate": dict(record.gate), "checkpoints": rows})
        return
    table = Table(title=f"{record.job or folder}: {record.updated}", title_justify="left")
    for name in ("step", "label", "size", "saved", "where", "why"):
        table.add_column(name)
    for entry in record.checkpoints:
        label = f"{entry.label.value} (pinned)" if entry.pinned else entry.label.value
        gone = "" if (store.folder / entry.path).is_dir() else " (gone)"
        size = f"{entry.size_bytes / 2**20:.1f} MiB"
        cells = (str(entry.step), label, size, entry.saved, entry.path + gone, entry.why)
        table.add_row(*cells)
    console.print(table)


@app.command()
def select(
    folder: Folder,
    failure: Annotated[
        str | None,
        typer.Option(
            envvar="SCOUT_FAILURE",
            help="sdc, straggler, hang, unreachable, unknown or none; default: what the job said.",
        ),
    ] = None,
    unreachable: Annotated[
        bool, typer.Option("--unreachable", help="A machine of the job does not answer.")
    ] = False,
    sweep: Annotated[
        str, typer.Option(help="Result of a replay of the whole catalogue: clean or dirty.")
    ] = "",
    quick: Quick = False,
    accept_uncertified: Annotated[
        bool, typer.Option("--accept-uncertified", help="You answer for what is not covered.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the checkpoint to start from; exit code 4 when none can be trusted."""
    store = TrustStore(folder)
    record = store.load()
    why = record.failure if failure is None else word(Failure, failure, "--failure")
    if sweep not in ("", "clean", "dirty"):
        raise ScoutError(f"--sweep={sweep!r} must be clean or dirty")
    choice = trust.choose(
        record,
        why,
        reachable=not unreachable,
        sweep_clean=None if not sweep else sweep == "clean",
        is_intact=lambda entry: not _problems(store, entry, quick),
        accept_uncertified=accept_uncertified,
    )
    path = None if choice.path is None else str((store.folder / choice.path).absolute())
    _show_choice(folder, replace(choice, path=path), why, as_json)
    if choice.step is None:
        raise typer.Exit(output.NO_TRUSTWORTHY_CHECKPOINT)


@app.command()
def verify(
    folder: Folder,
    checkpoint: Annotated[
        str, typer.Option(help="Step or name of one checkpoint; default: all of them.")
    ] = "",
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Compare files with their manifest; a damaged checkpoint is never chosen again."""
    store = TrustStore(folder)
    record = store.load()
    entries = [_find(record, checkpoint)] if checkpoint else list(record.checkpoints)
    found = {entry.path: _problems(store, entry, quick) for entry in entries}
    damaged = {path: "; ".join(wrong[:4]) for path, wrong in found.items() if wrong}
    if damaged:
        store.update(lambda before: _mark_damaged(before, damaged))
    if as_json:
        rows = [{**_row(store, entry), "problems": found[entry.path]} for entry in entries]
        _print("verify", folder, {"damaged": sorted(damaged), "checkpoints": rows})
    else:
        for entry in entries:
            state = damaged.get(entry.path) or _state_when_intact(entry, quick)
            console.print(f"{entry.step}  {entry.path}: {state}", markup=False)
    raise typer.Exit(output.FOUND_FAULT if damaged else output.FOUND_NOTHING)


@app.command()
def pin(
    folder: Folder,
    checkpoint: Which,
    off: Annotated[bool, typer.Option("--off", help="Take the pin away.")] = False,
    as_json: Json = False,
) -> None:
    """Keep a checkpoint until the pin is taken away."""
    store = TrustStore(folder)
    entry = _find(store.load(), checkpoint)
    store.update(lambda before: before.changed(entry.path, pinned=not off))
    _done("pin", folder, store, entry, "no longer pinned" if off else "pinned", as_json)


@app.command()
def drop(
    folder: Folder,
    checkpoint: Which,
    delete: Annotated[bool, typer.Option("--delete", help="Delete its files, too.")] = False,
    as_json: Json = False,
) -> None:
    """Never choose a checkpoint again."""
    store = TrustStore(folder)
    entry = _find(store.load(), checkpoint)
    if entry.pinned:
        raise ScoutError(f"{entry.path} is pinned; `scout ckpt pin --off` takes the pin away first")
    store.update(lambda before: _without(before, entry, Label.DROPPED, "dropped by hand"))
    if delete:
        shutil.rmtree(store.folder / entry.path)
    done = "dropped and deleted" if delete else "dropped"
    _done("drop", folder, store, entry, done, as_json)


@app.command()
def rebuild(
    folder: Folder,
    force: Annotated[
        bool, typer.Option("--force", help="Also replace a record that can be read.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a lost or corrupt record anew; every checkpoint in it is uncertified."""
    found = rebuild_record(folder, force)
    store = TrustStore(folder)
    if as_json:
        rows = [_row(store, entry) for entry in found.record.checkpoints]
        left_out = [{"folder": name, "why": why} for name, why in found.left_out]
        former = None if found.former is None else str(found.former)
        _print("rebuild", folder, {"former": former, "checkpoints": rows, "left_out": left_out})
        return
    if found.former is not None:
        log.print(f"the former record is now {found.former}", markup=False)
    for name, why in found.left_out:
        log.print(f"left out {name}: {why}", markup=False)
    console.print(f"{len(found.record.checkpoints)} checkpoints, all uncertified", markup=False)


def _find(record: Record, which: str) -> Entry:
    """Find by folder name, or the newest of a step."""
    named = [entry for entry in record.checkpoints if entry.path == which]
    of_step = [entry for entry in record.checkpoints if str(entry.step) == which]
    if not named and not of_step:
        known = ", ".join(f"{entry.step} ({entry.path})" for entry in record.checkpoints)
        raise ScoutError(f"there is no checkpoint {which!r}; the record has {known or 'none'}")
    return (named or of_step)[-1]


def _problems(store: TrustStore, entry: Entry, quick: bool) -> list[str]:
    return manifest.problems(store.folder / entry.path, entry.files, quick=quick)


def _without(record: Record, entry: Entry, label: Label, why: str) -> Record:
    """Rule a checkpoint out in the record and in the gate."""
    gate = CheckpointGate.from_state(dict(record.gate))
    gate.forget(entry.step, entry.path)
    return replace(record.changed(entry.path, label=label, why=why), gate=gate.state())


def _mark_damaged(record: Record, damaged: dict[str, str]) -> Record:
    for path, why in damaged.items():
        entry = record.entry(path)
        if entry is not None and entry.label is not Label.DROPPED:
            record = _without(record, entry, Label.DAMAGED, why)
    return record


def _state_when_intact(entry: Entry, quick: bool) -> str:
    if quick:
        return "sizes are as saved"
    return "as saved" if entry.is_signed else "sizes are as saved; not all files were signed"


def _row(store: TrustStore, entry: Entry) -> dict[str, Any]:
    place = (store.folder / entry.path).absolute()
    return {
        "step": entry.step,
        "label": entry.label.value,
        "path": str(place),
        "present": place.is_dir(),
        "pinned": entry.pinned,
        "saved": entry.saved,
        "size_bytes": entry.size_bytes,
        "signed": entry.is_signed,
        "recipes": list(entry.recipes),
        "incidents": list(entry.incidents),
        "why": entry.why,
    }


def _show_choice(folder: pathlib.Path, choice: Choice, failure: Failure, as_json: bool) -> None:
    if as_json:
        answer = {"choice": choice.choice, "step": choice.step, "path": choice.path}
        _print("select", folder, {"failure": failure.value, **answer, "why": choice.why})
        return
    log.print(f"{choice.choice}: {choice.why}", markup=False)
    if choice.path is not None:
        typer.echo(choice.path)


def _done(
    action: str, folder: pathlib.Path, store: TrustStore, entry: Entry, done: str, as_json: bool
) -> None:
    after = store.load().entry(entry.path) or entry
    if as_json:
        _print(action, folder, {"checkpoint": _row(store, after)})
    else:
        console.print(f"step {entry.step} ({entry.path}) is {done}", markup=False)


def _print(action: str, folder: pathlib.Path, payload: dict[str, Any]) -> None:
    print_json("ckpt", {"action": action, "folder": str(folder), **payload})
