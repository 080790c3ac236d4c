"""The JSON form of a `RankSnapshot` (schema "scout.rank_snapshot/1"): for sockets and files.

Fields at their default are left out: a healthy rank of four groups takes about 400 bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from scout_core.decision.evidence import Progress
from scout_core.decision.snapshots import (
    Channel,
    GroupState,
    Operation,
    OperationState,
    Phase,
    ProcessState,
    RankSnapshot,
)
from scout_core.errors import ScoutError

SCHEMA = "scout.rank_snapshot/1"

T = TypeVar("T", Operation, GroupState, Channel, RankSnapshot)
Reader = Callable[[Any], Any]


def to_json(snapshot: RankSnapshot) -> dict[str, Any]:
    """Return the snapshot as JSON values, with its schema."""
    return {"schema": SCHEMA, **_plain(snapshot)}


def from_json(record: object) -> RankSnapshot:
    """Read what `to_json` wrote; every field is checked for its type.

    Raises:
        ScoutError: another schema, an unknown field, or a value of another type.
    """
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise ScoutError(f"rank snapshot has schema {found!r}, not {SCHEMA!r}")
    try:
        return _read(RankSnapshot, {k: v for k, v in record.items() if k != "schema"})
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise ScoutError(f"rank snapshot cannot be read: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Operation | GroupState | Channel | RankSnapshot):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in fields(value)
            if field.default is MISSING or getattr(value, field.name) != field.default
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _read(kind: type[T], plain: object) -> T:
    readers = _READERS[kind]
    if not isinstance(plain, dict):
        raise TypeError(f"{kind.__name__} must be an object, not {plain!r}")
    return kind(**{name: readers[name](value) for name, value in plain.items()})


def _of(*kinds: type) -> Reader:
    def read(value: Any) -> Any:
        if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
            raise TypeError(f"{value!r} is not {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    return read


def _tuple_of(read: Reader) -> Reader:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        return tuple(read(item) for item in value)

    return read_all


def _progress(value: Any) -> Progress | None:
    return None if value is None else Progress(*_tuple_of(_of(int))(value))


_NONE = type(None)
_TEXT, _FLAG, _INT, _COUNT = _of(str), _of(bool), _of(int), _of(int, _NONE)
_OPERATIONS = _tuple_of(lambda plain: _read(Operation, plain))
_READERS: dict[type, dict[str, Reader]] = {
    Operation: {
        "sequence": _INT,
        "name": _TEXT,
        "arguments": _TEXT,
        "state": OperationState,
        "call_site": _TEXT,
        "age_s": _of(int, float, _NONE),
    },
    GroupState: {
        "name": _TEXT,
        "ranks": _tuple_of(_INT),
        "enqueued": _COUNT,
        "completed": _COUNT,
        "started": _COUNT,
        "operations": _OPERATIONS,
        "description": _TEXT,
        "backend": _TEXT,
        "counter": _TEXT,
        "members_known": _FLAG,
    },
    Channel: {
        "group": _TEXT,
        "peer": _INT,
        "sending": _FLAG,
        "enqueued": _COUNT,
        "completed": _COUNT,
        "operations": _OPERATIONS,
        "backend": _TEXT,
        "counter": _TEXT,
    },
    RankSnapshot: {
        "rank": _INT,
        "host": _TEXT,
        "device": _TEXT,
        "state": ProcessState,
        "state_age_s": _of(int, float, _NONE),
        "exit_code": _COUNT,
        "progress": _progress,
        "phase": Phase,
        "phase_age_s": _of(int, float, _NONE),
        "blocked": _of(bool, _NONE),
        "within_limit": _FLAG,
        "where": _TEXT,
        "error": _TEXT,
        "missing": _TEXT,
        "truncated": _FLAG,
        "source": _TEXT,
        "complete": _tuple_of(_TEXT),
        "unseen_p2p": _FLAG,
        "groups": _tuple_of(lambda plain: _read(GroupState, plain)),
        "channels": _tuple_of(lambda plain: _read(Channel, plain)),
    },
}
