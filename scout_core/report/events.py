"""Events and incidents as JSON lines in the run's folder: the one log SCOUT writes.

Needs no torch and no pydantic, because observer processes write here too.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from scout_core.decision.incident import Incident
from scout_core.errors import ScoutError

EVENTS = "events.jsonl"
INCIDENTS = "incidents.jsonl"


class RunDir:
    """The folder of one run. Appending never raises: a full disk must not stop a job.

    Each line is one `write` to a file opened for appending, so processes of a node may share it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the folder; one that cannot be written loses lines, with one line on stderr.

        Raises:
            ScoutError: the path is a file.
        """
        self.path = pathlib.Path(path)
        self.lost = 0
        """Lines that could not be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (FileExistsError, NotADirectoryError):
            raise ScoutError(f"run_dir={self.path} is a file; name a folder") from None
        except OSError as error:
            self._lose(error)

    def emit(self, event: str, *, rank: int, step: int, **fields: Any) -> None:
        """Append one event: a fixed name and fields with their units in the name."""
        self._append(EVENTS, {"time": now(), "event": event, "rank": rank, "step": step, **fields})

    def report(self, incident: Incident) -> None:
        """Append one incident."""
        self._append(INCIDENTS, incident.to_json())

    def events(self) -> list[dict[str, Any]]:
        """Read the events back, oldest first."""
        return list(_read(self.path / EVENTS))

    def incidents(self) -> list[Incident]:
        """Read the incidents back, oldest first."""
        return [Incident.from_json(record) for record in _read(self.path / INCIDENTS)]

    def _append(self, name: str, record: dict[str, Any]) -> None:
        plain = json.loads(json.dumps(record, default=str), parse_constant=str)  # JSON has no nan
        line = json.dumps(plain).encode() + b"\n"
        try:
            handle = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.write(handle, line) < len(line):
                    raise OSError("the disk is full")
            finally:
                os.close(handle)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        if self.lost == 1:
            print(f"scout: run_dir={self.path} cannot be written: {error}", file=sys.stderr)


def print_line(line: str) -> None:
    """Print to stderr at once; never raises, even when the stream is closed."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def now() -> str:
    """UTC time, ISO 8601, milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yield the records; a last line without its end is still being written, or its writer died."""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ScoutError(
                f"line {number} of {path} is no JSON ({error}); remove it to read the others"
            ) from None
