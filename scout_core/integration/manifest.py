"""The files of a checkpoint: their sizes and signatures, and whether they are still the same.

Reads files only as bytes: nothing of a checkpoint is unpickled here.
"""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from scout_core.decision.trust import Entry, File
from scout_core.errors import ScoutError
from scout_core.integration.trust_record import write_atomically

MANIFEST = "scout_manifest.json"
_SCHEMA = "scout.manifest/1"
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Share:
    """The files one rank looks after: each file has one rank, the same whoever lists the folder."""

    rank: int = 0
    ranks: int = 1

    def holds(self, name: str) -> bool:
        """Tell whether the file is this rank's."""
        return zlib.crc32(name.encode()) % self.ranks == self.rank


ALL = Share()


def list_files(folder: pathlib.Path) -> tuple[File, ...]:
    """List names and sizes, sorted by name, without signatures and without the manifest itself.

    Raises:
        OSError: the folder cannot be read.
    """
    paths = [path for path in folder.rglob("*") if MANIFEST not in path.name and path.is_file()]
    return tuple(
        File(path.relative_to(folder).as_posix(), path.stat().st_size) for path in sorted(paths)
    )


def sign(folder: pathlib.Path, files: Iterable[File], share: Share = ALL) -> tuple[File, ...]:
    """Return this share of the files with their signatures.

    Raises:
        OSError: a file cannot be read.
    """
    return tuple(
        File(file.name, file.size_bytes, _xxh3(folder / file.name))
        for file in files
        if share.holds(file.name)
    )


def problems(
    folder: pathlib.Path, files: Sequence[File], share: Share = ALL, quick: bool = False
) -> list[str]:
    """Say how files differ from their manifest, one phrase each; empty when they do not.

    Args:
        quick: compare names and sizes only; otherwise every byte is read.
    """
    if not files:
        return ["its files are not known"]
    found = []
    for file in files:
        if share.holds(file.name):
            problem = _problem(folder / file.name, file, quick)
            found += [f"{file.name} {problem}"] if problem else []
    return found


def write_manifest(folder: pathlib.Path, entry: Entry) -> None:
    """Leave the manifest beside the files, for `scout ckpt rebuild`.

    Raises:
        OSError: the file cannot be written.
    """
    files = [[file.name, file.size_bytes, file.xxh3] for file in entry.files]
    plain = {"schema": _SCHEMA, "step": entry.step, "saved": entry.saved, "files": files}
    write_atomically(folder / MANIFEST, (json.dumps(plain, indent=1) + "\n").encode())


def read_manifest(folder: pathlib.Path) -> tuple[int, str, tuple[File, ...]]:
    """Return step, time of saving and files.

    Raises:
        ScoutError: there is none, or it cannot be read.
    """
    try:
        plain = json.loads((folder / MANIFEST).read_bytes())
        if plain["schema"] != _SCHEMA:
            raise ValueError(f"schema {plain['schema']!r}, not {_SCHEMA!r}")
        files = tuple(File(str(name), int(size), str(sig)) for name, size, sig in plain["files"])
        return int(plain["step"]), str(plain["saved"]), files
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ScoutError(
            f"{folder / MANIFEST} cannot be read ({error!r}); "
            "a folder without it was never complete, or was not written through SCOUT"
        ) from error


def _problem(path: pathlib.Path, file: File, quick: bool) -> str:
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"has {size} bytes instead of {file.size_bytes}"
        if not quick and file.xxh3 and _xxh3(path) != file.xxh3:
            return "has other content than when it was saved"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _xxh3(path: pathlib.Path) -> str:
    state = xxhash.xxh3_64()
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0, opener=_open_sequential) as stream:
        while count := stream.readinto(piece):
            state.update(piece[:count])
    return state.hexdigest()


def _open_sequential(path: str, flags: int) -> int:
    handle = os.open(path, flags)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return handle
