"""The format of Flight Recorder dumps: pickle or JSON in, checked values out.

Dumps come from machines that failed, so nothing in them is trusted: the unpickler admits no
class, and every field that is used is checked for its type.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from scout_core.decision.operations import one_word
from scout_core.errors import ScoutError

_ARROW = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
_UNEVEN = frozenset({"all_to_all", "gather", "scatter"})
"""Operations whose element counts may differ between members."""


@dataclass(frozen=True, slots=True)
class Status:
    """`pg_status` of one process group: numbers of the last operations; -1 for none yet."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation in the ring of the Flight Recorder."""

    record: int
    group: str
    description: str
    local_id: int
    """Number of the group on this rank, the key of `pg_status`."""
    name: str
    """See `decision.operations.one_word`."""
    backend: str
    collective: int
    """Number of the collective; for a point-to-point operation, of the last one before it."""
    pair: int
    """Number of the point-to-point operation in its group on this rank."""
    call: int
    """Number of the operation, of either sort, in its group on this rank."""
    is_pair: bool
    own_position: int | None
    """Position in the group, for a point-to-point operation that says so."""
    peer_position: int | None
    arguments: str
    done: bool
    started: bool
    call_site: str
    created_ns: int


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's dump."""

    source: str
    rank: int | None
    """Global rank, in the few versions that say it."""
    members: Mapping[str, tuple[int, ...]]
    """Group name -> global ranks, as far as the back-end declares them."""
    descriptions: Mapping[str, str]
    status: Mapping[int, Status]
    """By the group's number on this rank; see `Entry.local_id`."""
    entries: tuple[Entry, ...]
    """Oldest first."""


def is_dump(record: object) -> bool:
    """Tell whether decoded JSON or pickle is a Flight Recorder dump."""
    return isinstance(record, dict) and "entries" in record and "schema" not in record


def unpickle(data: bytes, source: str) -> object:
    """Decode a pickle that holds plain values only.

    Raises:
        ScoutError: it names a class or function, or is cut off or damaged.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except ScoutError as error:
        raise ScoutError(f"{source}: {error}") from None
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError),
        *(AttributeError, OverflowError, MemoryError, RecursionError, struct.error),
    ) as error:
        raise ScoutError(f"{source} is not a readable pickle: {error!r}") from error


def parse_dump(record: object, source: str) -> Dump:
    """Check and convert a decoded dump.

    Raises:
        ScoutError: a field that is needed is missing or has another type.
    """
    try:
        if not isinstance(record, dict):
            raise TypeError(f"a {type(record).__name__} instead of an object")
        configs = [_group(name, config) for name, config in record.get("pg_config", {}).items()]
        entries = [_entry(item) for item in record["entries"]]
        rank = record.get("rank")
        return Dump(
            source=source,
            rank=None if rank is None else int(rank),
            members={name: ranks for name, _, ranks in configs if ranks},
            descriptions={name: text for name, text, _ in configs},
            status={int(k): _status(v) for k, v in (record.get("pg_status") or {}).items()},
            entries=tuple(sorted(entries, key=lambda entry: entry.record)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ScoutError(f"{source} is not a Flight Recorder dump: {error!r}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Refuses everything that is not a plain value: a dump never needs a class."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise ScoutError(
            f"the pickle asks for {module_name}.{global_name}; a dump holds plain values only, "
            "so this file is not loaded"
        )


def _group(name: str, config: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    ranks = config.get("ranks", ())
    listed = json.loads(ranks) if isinstance(ranks, str) else ranks
    return str(name), str(config.get("desc", "")), tuple(int(rank) for rank in listed)


def _status(status: Mapping[str, Any]) -> Status:
    return Status(
        enqueued=int(status["last_enqueued_collective"]),
        started=int(status.get("last_started_collective", -1)),
        completed=int(status["last_completed_collective"]),
    )


def _entry(item: Mapping[str, Any]) -> Entry:
    raw = str(item["profiling_name"])
    group, description = _group_of(item["process_group"])
    name = one_word(raw)
    own, peer = _ends(raw)
    sequence = int(item["collective_seq_id"] if "collective_seq_id" in item else item["seq_id"])
    is_pair = bool(item.get("is_p2p", own is not None))
    state = str(item["state"])
    finished = item.get("time_discovered_completed_ns") or item.get("retired")
    return Entry(
        record=int(item.get("record_id", item.get("id", 0))),
        group=group,
        description=description,
        local_id=int(item.get("pg_id", -1)),
        name=name,
        backend=raw.partition(":")[0] if ":" in raw else "",
        collective=sequence,
        pair=int(item.get("p2p_seq_id", 0)),
        call=int(item.get("op_id", sequence)),
        is_pair=is_pair,
        own_position=own,
        peer_position=peer,
        arguments=_arguments(name, item),
        done=state == "completed" or bool(finished),
        started=state == "started" or bool(item.get("time_discovered_started_ns")),
        call_site=_call_site(item.get("frames") or ()),
        created_ns=int(item.get("time_created_ns") or 0),
    )


def _group_of(value: object) -> tuple[str, str]:
    if isinstance(value, list | tuple):
        return str(value[0]), str(value[1]) if len(value) > 1 else ""
    return str(value), ""


def _ends(raw: str) -> tuple[int | None, int | None]:
    """Read the positions out of "nccl:send 0->1" and "nccl:recv 1<-0": own first, then peer."""
    found = _ARROW.search(raw)
    return (int(found[1]), int(found[3])) if found else (None, None)


def _arguments(name: str, item: Mapping[str, Any]) -> str:
    """Say what must be equal on all members: element type and, unless uneven, count."""
    dtypes = sorted({str(dtype) for dtype in item.get("input_dtypes") or ()})
    if not dtypes or name == "barrier":
        return ""
    if name in _UNEVEN:
        return "" if name != "all_to_all" else "/".join(dtypes)
    sizes: Sequence[Sequence[int]] = item.get("input_sizes") or ()
    count = sum(math.prod(int(n) for n in size) for size in sizes)
    return f"{'/'.join(dtypes)} x {count}"


def _call_site(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside torch."""
    outside = (frame for frame in frames if "/torch/" not in str(frame.get("filename", "")))
    frame = next(outside, None)
    if frame is None:
        return ""
    file = str(frame.get("filename", "")).rpartition("/")[2]
    return f"{file}:{frame.get('line', 0)} {frame.get('name', '')}".strip()
