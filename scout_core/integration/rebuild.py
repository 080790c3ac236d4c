"""Make a trust record anew from the manifests beside the checkpoints; nothing in it is trusted."""

from __future__ import annotations

import os
import pathlib
from typing import NamedTuple

from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Label
from scout_core.decision.trust import Entry, Record
from scout_core.errors import ScoutError
from scout_core.integration.manifest import MANIFEST, problems, read_manifest
from scout_core.integration.trust_record import TrustStore

WHY = "the record of its evidence was lost"


class Rebuilt(NamedTuple):
    """What was found."""

    record: Record
    left_out: tuple[tuple[str, str], ...]  # folder and why it is not in the record
    former: pathlib.Path | None  # where the unreadable record is now


def rebuild(folder: pathlib.Path, force: bool = False) -> Rebuilt:
    """Write a record of all folders that have a manifest and all files that it names.

    Args:
        force: do it although there is a readable record, and lose its labels.

    Raises:
        ScoutError: no such folder, or the record is fine.
        OSError: the record cannot be written.
    """
    store = TrustStore(folder)
    if not folder.is_dir():
        raise ScoutError(f"{folder} is no folder; name the one that holds the checkpoints")
    if not force and _is_readable(store):
        raise ScoutError(
            f"{store.path} can be read, so nothing is lost; "
            "--force rebuilds it all the same, and every label becomes uncertified"
        )
    entries, left_out = [], []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            entries.append(_entry(place))
        except ScoutError as error:
            left_out.append((place.name, str(error)))
    entries.sort(key=lambda entry: (entry.saved, entry.step))
    former = _set_aside(store.path)
    gate = CheckpointGate(1, [WHY])
    gate.on_evidence_lost()
    record = Record(gate.state(), checkpoints=tuple(entries))
    return Rebuilt(store.write(record), tuple(left_out), former)


def _entry(place: pathlib.Path) -> Entry:
    if not (place / MANIFEST).exists():
        raise ScoutError(f"it has no {MANIFEST}: never complete, or not saved through SCOUT")
    step, saved, files = read_manifest(place)
    wrong = problems(place, files)
    if wrong:
        raise ScoutError("; ".join(wrong[:3]))
    return Entry(step, place.name, Label.UNCERTIFIED, saved, WHY, files=files)


def _is_readable(store: TrustStore) -> bool:
    try:
        store.load()
    except ScoutError:
        return False
    return True


def _set_aside(path: pathlib.Path) -> pathlib.Path | None:
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.former-{number}")).exists():
        number += 1
    os.rename(path, target)
    return target
