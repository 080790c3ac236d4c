"""Everything a stopped job left in a folder, whatever its files are called, as rank snapshots.

What a file is, is decided by its content: Flight Recorder pickle or JSON, SCOUT rank snapshots
(JSON, a list, or JSON lines), or a log with lines of torch's watchdog.
"""

from __future__ import annotations

import json
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from scout_core.decision.merging import merge, share_members
from scout_core.decision.snapshot_json import SCHEMA, from_json
from scout_core.decision.snapshots import C10D_COUNTER, GroupState, RankSnapshot
from scout_core.errors import ScoutError
from scout_core.evidence import flight_recorder, watchdog_log
from scout_core.evidence.dump_format import Dump, is_dump, parse_dump, unpickle

HEAD_BYTES = 4096
"""Read first, so that checkpoints and other binaries are passed over at once."""
LARGEST_BYTES = 1 << 29


@dataclass(frozen=True)
class Skipped:
    """A file that was not used, and why."""

    file: str
    why: str


@dataclass
class Evidence:
    """What was found, by kind."""

    dumps: list[Dump] = field(default_factory=list)
    observed: dict[int, RankSnapshot] = field(default_factory=dict)
    """SCOUT's own snapshots, by rank; of several the last one written."""
    logged: list[RankSnapshot] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class Remains:
    """What a stopped job left behind."""

    snapshots: list[RankSnapshot]
    """One per rank, in rank order."""
    skipped: list[Skipped]
    """In the order of their names."""
    files_used: int
    newest_ns: int
    """When the last operation in any dump was entered, since the epoch; 0 when unknown."""


def load(folder: pathlib.Path) -> Remains:
    """Read all evidence below a folder.

    Raises:
        ScoutError: the folder does not exist, or no file in it is evidence of a hang.
    """
    if not folder.is_dir():
        raise ScoutError(f"{folder} is not a folder; give the folder that holds the dumps")
    found = Evidence()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _read(path, path.relative_to(folder).as_posix(), found)
    from_dumps, unused = flight_recorder.snapshots(found.dumps)
    found.skipped += [Skipped(dump.source, why) for dump, why in unused]
    used = len(files) - len(found.skipped)
    if not used:
        first = f"; {found.skipped[0].file}: {found.skipped[0].why}" if found.skipped else ""
        raise ScoutError(
            f"{folder} holds no evidence of a hang ({len(files)} files looked at{first}); "
            "give a folder with Flight Recorder dumps, SCOUT snapshots or watchdog logs"
        )
    return Remains(
        snapshots=_combine(found.observed.values(), from_dumps, found.logged),
        skipped=sorted(found.skipped, key=lambda skipped: skipped.file),
        files_used=used,
        newest_ns=max((e.created_ns for dump in found.dumps for e in dump.entries), default=0),
    )


def _read(path: pathlib.Path, name: str, found: Evidence) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if b"\0" in head and not head.startswith(flight_recorder.PICKLE):
                raise ScoutError("binary, but no pickle")
            if path.stat().st_size > LARGEST_BYTES:
                raise ScoutError(f"larger than {LARGEST_BYTES >> 20} MiB; cut out what matters")
            data = head + file.read()
        if data.startswith(flight_recorder.PICKLE):
            found.dumps.append(parse_dump(unpickle(data, name), name))
        elif not (data.lstrip()[:1] in (b"{", b"[") and _read_json(data, name, found)):
            _read_text(data, name, found)
    except OSError as error:
        found.skipped.append(Skipped(name, f"cannot be read: {error.strerror}"))
    except ScoutError as error:
        found.skipped.append(Skipped(name, str(error)))


def _read_json(data: bytes, name: str, found: Evidence) -> bool:
    """Take in JSON evidence; False when it is not JSON at all."""
    try:
        records = list(_records(data))
    except ValueError:
        return False
    if len(records) == 1 and is_dump(records[0]):
        found.dumps.append(parse_dump(records[0], name))
        return True
    snapshots = [r for r in records if isinstance(r, dict) and r.get("schema") == SCHEMA]
    if not snapshots:
        raise ScoutError("JSON, but neither a Flight Recorder dump nor rank snapshots")
    for record in snapshots:
        snapshot = from_json(record)
        found.observed[snapshot.rank] = replace(snapshot, source=snapshot.source or name)
    return True


def _records(data: bytes) -> Iterator[object]:
    """Yield the values of a JSON document, of its list, or of JSON lines."""
    try:
        document = json.loads(data)
    except json.JSONDecodeError:
        for line in data.splitlines():
            if line.strip():
                yield json.loads(line)
        return
    yield from document if isinstance(document, list) else [document]


def _read_text(data: bytes, name: str, found: Evidence) -> None:
    lines = data.decode(errors="replace").splitlines()
    snapshots = watchdog_log.parse_log(lines, name)
    if not snapshots:
        raise ScoutError("neither a dump nor a log with lines of torch's watchdog")
    found.logged += snapshots


def _combine(
    observed: Iterable[RankSnapshot],
    dumped: Iterable[RankSnapshot],
    logged: Iterable[RankSnapshot],
) -> list[RankSnapshot]:
    by_rank: dict[int, list[RankSnapshot]] = defaultdict(list)
    dumps = list(dumped)
    logs = [_without_arguments(s) for s in logged] if dumps else logged
    for snapshot in (*observed, *dumps, *logs):
        by_rank[snapshot.rank].append(snapshot)
    return share_members(merge(by_rank[rank]) for rank in sorted(by_rank))


def _without_arguments(snapshot: RankSnapshot) -> RankSnapshot:
    """A log spells arguments in another way than a dump: they cannot be compared."""
    return replace(snapshot, groups=tuple(_bare(state) for state in snapshot.groups))


def _bare(state: GroupState) -> GroupState:
    assert state.counter == C10D_COUNTER
    return replace(state, operations=tuple(replace(op, arguments="") for op in state.operations))
