"""Rank 0's part of the gate service: the record, the files' signatures, work in the background."""

from __future__ import annotations

import functools
import pathlib
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from scout_core.decision import trust
from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Failure, Label
from scout_core.decision.trust import Entry, File, Record
from scout_core.errors import ScoutError
from scout_core.integration import manifest
from scout_core.integration.agreement import Agreement, Part
from scout_core.integration.manifest import Share
from scout_core.integration.saves import Job, Purge, RemoveFiles
from scout_core.integration.trust_record import TrustStore
from scout_core.report.events import now

Dropped = tuple[int, str]  # step and path of a checkpoint that must not be chosen any more


class Emit(Protocol):
    """Where events go; the session passes its own."""

    def __call__(self, event: str, **fields: Any) -> None: ...


class Background:
    """One thread for what training need not wait for: reading files back, removing old ones."""

    def __init__(self, emit: Emit) -> None:
        """Start nothing yet; a failed task becomes one event."""
        self._emit = emit
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scout-checkpoint")
        self._tasks: list[tuple[str, Future[Any]]] = []

    def start(self, what: str, task: Callable[[], Any]) -> None:
        """Queue a task; `what` says in an event what failed."""
        self._tasks.append((what, self._pool.submit(task)))

    def finished(self) -> list[Any]:
        """Return results of tasks that ended since the last call, in their order."""
        done = [(what, task) for what, task in self._tasks if task.done()]
        self._tasks = [pair for pair in self._tasks if not pair[1].done()]
        for what, task in done:
            error = task.exception()
            if error is not None:
                self._emit("checkpoint_task_failed", task=what, error=repr(error))
        return [task.result() for _, task in done if task.exception() is None]

    def wait(self) -> None:
        """Wait for the queued tasks."""
        futures.wait([task for _, task in self._tasks])

    def close(self) -> None:
        """Wait for the queued tasks and take no more."""
        self._pool.shutdown()


class Signer:
    """Signs this rank's share of the files of each new checkpoint, in the background."""

    def __init__(self, share: Share, emit: Emit) -> None:
        """Sign the files that `share` holds."""
        self._share = share
        self._background = Background(emit)

    def start(self, path: str, folder: pathlib.Path) -> None:
        """Begin to sign a complete checkpoint.

        Args:
            path: its name in the record.
        """
        self._background.start(f"sign {path}", lambda: (path, self._sign(folder)))

    def take(self) -> list[tuple[str, list[list[Any]]]]:
        """Return what has been signed since the last call, as JSON values."""
        return [
            (path, [[file.name, file.size_bytes, file.xxh3] for file in files])
            for path, files in self._background.finished()
        ]

    def wait(self) -> None:
        """Wait for what is being signed."""
        self._background.wait()

    def close(self) -> None:
        """Wait for what is being signed and sign no more."""
        self._background.close()

    def _sign(self, folder: pathlib.Path) -> tuple[File, ...]:
        if not folder.exists():
            return ()  # removed meanwhile
        return manifest.sign(folder, manifest.list_files(folder), self._share)


class RecordKeeper:
    """Keeps the trust record of a job up to date on disk.

    A record that cannot be written is tried again at the next change, with one event each time:
    the job goes on, and what is not in the record is not trusted after a restart.
    """

    def __init__(self, store: TrustStore, record: Record, emit: Emit) -> None:
        """Take over a record that was read or just made."""
        self.record = record
        self._store = store
        self._emit = emit
        self._written: object = None
        self._dropped: list[Dropped] = []
        self._doomed: list[tuple[str, RemoveFiles]] = []
        self._background = Background(emit)

    def folder(self, path: str) -> pathlib.Path:
        """Return where a checkpoint of the record lies."""
        return self._store.folder / path

    def dropped(self) -> list[Dropped]:
        """Return checkpoints that a person or a purge took away since the last call."""
        gone, self._dropped = self._dropped, []
        return gone

    def enter(self, step: int, path: str, label: Label, recipes: Sequence[str]) -> None:
        """Add a checkpoint whose files are complete."""
        try:
            files = manifest.list_files(self.folder(path))
        except OSError as error:
            self._emit("checkpoint_files_unknown", path=path, error=repr(error))
            files = ()
        entry = Entry(step, path, label, now(), recipes=tuple(recipes), files=files)
        self.record = self.record.with_entry(entry)

    def add_signatures(self, path: str, signed: Iterable[File]) -> None:
        """Fill in the signatures of one rank's share of the files."""
        entry = self.record.entry(path)
        if entry is None:
            return
        known = {file.name: file for file in signed}
        files = tuple(known.get(file.name, file) for file in entry.files)
        self.record = self.record.changed(path, files=files)
        self._leave_manifest(replace(entry, files=files))

    def abandon(self, newer_than: int) -> None:
        """The job went back to a step."""
        self.record = trust.abandon(self.record, newer_than)

    def mark(self, path: str, label: Label, why: str) -> None:
        """Give a checkpoint a label that no gate changes."""
        self.record = self.record.changed(path, label=label, why=why)

    def moved(self, path: str, new_path: str, remove_files: RemoveFiles) -> None:
        """A checkpoint was copied; its former files are deleted once the record names the new."""
        self.record = self.record.changed(path, path=new_path)
        self._doomed.append((path, remove_files))
        entry = self.record.entry(new_path)
        if entry is not None:
            self._leave_manifest(entry)

    def write(
        self,
        gate: CheckpointGate,
        incidents: Iterable[str] = (),
        failure: Failure | None = None,
        purge: Purge | None = None,
    ) -> None:
        """Bring the record on disk in line with the gate, if anything a reader sees has changed.

        Files of purged checkpoints are deleted once the record without them is written.
        """
        self._background.finished()
        ours = trust.relabel(self.record, gate, incidents)
        ours = ours if failure is None else replace(ours, failure=failure)
        self.record = ours
        if purge is None and _visible(ours, gate) == self._written:
            return
        try:
            self.record = self._store.update(lambda theirs: self._merge(ours, theirs, purge))
        except (OSError, ValueError) as error:
            self._emit("trust_record_not_written", error=str(error))
            return
        self._written = _visible(self.record, gate)
        self._notice_drops(ours)
        self._delete_doomed()

    def close(self) -> None:
        """Wait for what is being written or removed."""
        self._background.close()
        self._background.finished()

    def _merge(self, ours: Record, theirs: Record, purge: Purge | None) -> Record:
        """Purge after pins were taken over: somebody may just have set one."""
        merged = trust.merged(ours, theirs)
        if purge is None:
            return merged
        gone = [entry.path for entry in trust.purgeable(merged, purge.keep_last)]
        self._doomed += [(path, purge.remove_files) for path in gone]
        return merged.without(gone)

    def _leave_manifest(self, entry: Entry) -> None:
        if entry.is_signed:
            self._background.start(
                f"write the manifest of {entry.path}",
                functools.partial(_write_manifest, self.folder(entry.path), entry),
            )

    def _delete_doomed(self) -> None:
        for path, remove_files in self._doomed:
            folder = self.folder(path)
            self._background.start(f"remove {path}", functools.partial(remove_files, folder))
        self._doomed = []

    def _notice_drops(self, ours: Record) -> None:
        """What a person ruled out in the file must leave every rank's gate."""
        for entry in self.record.checkpoints:
            before = ours.entry(entry.path)
            if before is not None and before.label is not entry.label:
                self._dropped.append((entry.step, entry.path))


def _visible(record: Record, gate: CheckpointGate) -> object:
    """What a reader of the record would notice."""
    slots = (gate.latest, gate.candidate, gate.verified, gate.uncertified, gate.doubts)
    return replace(record, gate={}, updated=""), slots


class Opened(NamedTuple):
    """A record that all ranks have; `keeper` is rank 0's."""

    record: Record
    keeper: RecordKeeper | None
    machines_gone: bool  # a machine of the earlier run is not part of this one


def open_record(store: TrustStore, agreement: Agreement, job: Job, emit: Emit) -> Opened:
    """Let rank 0 read or begin the record, and tell all ranks; collective.

    Raises:
        ScoutError: it cannot be read, on all ranks alike, or the ranks do not come together.
    """
    gate = CheckpointGate(max(1, job.catalog_size), job.uncovered).state()
    fresh = Record(gate, job.name, job.topology, agreement.num_ranks)
    mine: Part = {"host": socket.gethostname(), "record": None, "error": ""}
    if agreement.rank == 0:
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
            found = store.load() if store.exists() else store.write(fresh)
            mine["record"] = found.to_json()
        except (OSError, ScoutError) as error:
            mine["error"] = str(error)
    parts = agreement.round({"round": "open"}, mine)
    if parts is None or parts[0]["error"]:
        raise ScoutError(agreement.broken if parts is None else parts[0]["error"])
    hosts = tuple(sorted({str(part["host"]) for part in parts}))
    former = Record.from_json(parts[0]["record"], str(store.path))
    kept = {name: getattr(former, name) for name in ("gate", "failure", "checkpoints")}
    record = replace(fresh, hosts=hosts, **kept)
    machines_gone = not set(former.hosts) <= set(hosts)
    keeper = RecordKeeper(store, record, emit) if agreement.rank == 0 else None
    return Opened(record, keeper, machines_gone)


def _write_manifest(folder: pathlib.Path, entry: Entry) -> None:
    if folder.exists():  # not purged meanwhile
        manifest.write_manifest(folder, entry)
