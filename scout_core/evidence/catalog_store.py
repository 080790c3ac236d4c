"""Catalogue files on disk, and the journal that lets an interrupted discovery go on."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from scout_core.decision.catalog import Observation, Shape
from scout_core.decision.catalog_file import CatalogFile, shape_from_json
from scout_core.errors import ScoutError

JOURNAL_SCHEMA = "scout.catalog-journal/1"


class Entry(NamedTuple):
    """One observation of a discovery; without fingerprint when the execution was not seen."""

    shape: Shape
    seconds: float
    observation: Observation | None
    unseen: str
    """Why there is no observation."""


def read_catalog(path: str | os.PathLike[str]) -> CatalogFile:
    """Read and check a catalogue.

    Raises:
        ScoutError: missing, not JSON, not a catalogue, or changed after it was written.
    """
    return CatalogFile.from_json(read_json(path, "a catalogue"), str(path))


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Read a JSON file that a user named.

    Raises:
        ScoutError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise ScoutError(f"{what} cannot be read from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ScoutError(f"{path} should be {what} but is not JSON: {error}") from error


def write_catalog(path: str | os.PathLike[str], file: CatalogFile) -> None:
    """Write a catalogue; readers see the old file or the new one, never a part.

    Raises:
        ScoutError: the folder cannot be written.
    """
    target = pathlib.Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(file.to_json(), separators=(",", ":")) + "\n")
        partial.chmod(0o600)
        partial.replace(target)
    except OSError as error:
        raise ScoutError(f"the catalogue cannot be written to {path}: {error.strerror}") from error


class Journal:
    """Observations of a discovery, one line each, appended as they are made."""

    def __init__(self, path: pathlib.Path, key: str) -> None:
        """Open a journal, or start one.

        Args:
            key: what is observed, and where; a journal of another key is not continued.

        Raises:
            ScoutError: the file belongs to another discovery, or is damaged before its last line.
        """
        self._path = path
        self.entries: tuple[Entry, ...] = ()
        """What was observed before."""
        try:
            whole = _whole_lines(path)
            if whole:
                self.entries = tuple(_entries(whole, key, path))
            self._file = path.open("a" if whole else "w")
        except OSError as error:
            raise ScoutError(f"the journal {path} cannot be used: {error.strerror}") from error
        if not whole:
            self._append({"schema": JOURNAL_SCHEMA, "key": key})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, entry: Entry) -> None:
        """Append an observation."""
        record: dict[str, Any] = {"shape": entry.shape, "seconds": entry.seconds}
        if entry.observation is None:
            record["unseen"] = entry.unseen
        else:
            record["fingerprint"] = entry.observation.fingerprint
            record["path_counts"] = entry.observation.path_counts
        self._append(record)

    def remove(self) -> None:
        """Delete the file: its observations are in the catalogue now."""
        self._path.unlink()

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()


def _whole_lines(path: pathlib.Path) -> list[str]:
    """Return the complete lines; a last one without its end was cut by a crash, and is dropped."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return whole.splitlines()


def _entries(lines: list[str], key: str, path: pathlib.Path) -> Iterator[Entry]:
    try:
        header, *records = [json.loads(line) for line in lines]
        if (header["schema"], header["key"]) != (JOURNAL_SCHEMA, key):
            raise ScoutError(
                f"{path} belongs to a discovery with other shapes, settings or environment; "
                "delete it, or write to another file"
            )
        for record in records:
            shape = shape_from_json(record["shape"])
            seen = None
            if "fingerprint" in record:
                seen = Observation(shape, record["fingerprint"], record["path_counts"])
            yield Entry(shape, float(record["seconds"]), seen, record.get("unseen", ""))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ScoutError(f"the journal {path} is damaged ({error!r}); delete it") from error
