"""The trust record: every checkpoint of a run with its label, evidence and files. Pure values.

Where it lives and how it is written is `integration.trust_record`; this module says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Choice, Failure, Label, Saved
from scout_core.errors import ScoutError

SCHEMA = "scout.trust/1"

_SETTLED = (Label.ABANDONED, Label.DAMAGED, Label.DROPPED, Label.REFUSED)  # the gate changes none
_PROVEN = (Label.VERIFIED, Label.UNCERTIFIED)
_USABLE = (Label.UNPROVEN, Label.CANDIDATE, *_PROVEN)


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    name: str
    """Relative to the checkpoint's folder."""
    size_bytes: int
    xxh3: str = ""
    """64-bit signature of the content, 16 hex digits; empty until it has been computed."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint that was complete on every rank when it was entered."""

    step: int
    path: str
    """Relative to the record's folder; absolute when it lies elsewhere, as in memory."""
    label: Label
    saved: str = ""
    """UTC, ISO 8601."""
    why: str = ""
    """What its label rests on, one sentence."""
    pinned: bool = False
    """Kept until somebody takes the pin away."""
    recipes: tuple[str, ...] = ()
    """Recipes accepted in the cycle under way when it was saved."""
    incidents: tuple[str, ...] = ()
    """Identifiers of the incidents that speak against it."""
    files: tuple[File, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_signed(self) -> bool:
        """Every file has its signature."""
        return bool(self.files) and all(file.xxh3 for file in self.files)

    @property
    def saved_as(self) -> Saved:
        """How the gate knows it."""
        return Saved(self.step, self.path)


@dataclass(frozen=True)
class Record:
    """Everything that is known about a run's checkpoints."""

    gate: Mapping[str, Any]
    """State of the `CheckpointGate`."""
    job: str = ""
    topology: str = ""
    """Digest of the addresses of all ranks."""
    world_size: int = 1
    hosts: tuple[str, ...] = ()
    """Names of the machines, sorted."""
    updated: str = ""
    failure: Failure = Failure.UNKNOWN
    """Why the job stopped, as far as it could say; UNKNOWN while it runs."""
    checkpoints: tuple[Entry, ...] = ()
    """In the order of saving."""

    def entry(self, path: str) -> Entry | None:
        """Find a checkpoint by its path."""
        return next((entry for entry in self.checkpoints if entry.path == path), None)

    def with_entry(self, new: Entry) -> Record:
        """Add a checkpoint, or put it in the place of the one with the same path."""
        kept = tuple(entry for entry in self.checkpoints if entry.path != new.path)
        return replace(self, checkpoints=(*kept, new))

    def changed(self, path: str, /, **fields: Any) -> Record:
        """Change fields of one checkpoint."""
        return replace(
            self,
            checkpoints=tuple(
                replace(entry, **fields) if entry.path == path else entry
                for entry in self.checkpoints
            ),
        )

    def without(self, paths: Iterable[str]) -> Record:
        """Leave checkpoints out."""
        gone = set(paths)
        kept = tuple(entry for entry in self.checkpoints if entry.path not in gone)
        return replace(self, checkpoints=kept)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, with the schema."""
        plain = asdict(self)
        plain["failure"] = self.failure.value
        for shown, entry in zip(plain["checkpoints"], self.checkpoints, strict=True):
            shown["label"] = entry.label.value
        return {"schema": SCHEMA, **plain}

    @classmethod
    def from_json(cls, plain: Any, place: str) -> Record:
        """Read a record back.

        Args:
            place: where it was read, for the error.

        Raises:
            ScoutError: another schema, an unknown or missing field; nothing is guessed.
        """
        try:
            fields = dict(plain)
            if fields.pop("schema") != SCHEMA:
                raise ValueError(f"schema {plain['schema']!r}, not {SCHEMA!r}")
            fields["failure"] = Failure(fields["failure"])
            fields["hosts"] = tuple(fields["hosts"])
            fields["checkpoints"] = tuple(map(_entry, fields["checkpoints"]))
            CheckpointGate.from_state(fields["gate"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ScoutError(
                f"the trust record {place} cannot be read: {error!r}; no checkpoint is trusted "
                "without it; `scout ckpt rebuild` makes a new one in which all are uncertified"
            ) from error


def _entry(plain: Mapping[str, Any]) -> Entry:
    fields = dict(plain)
    fields["label"] = Label(fields["label"])
    for name in ("recipes", "incidents"):
        fields[name] = tuple(fields[name])
    fields["files"] = tuple(File(**file) for file in fields["files"])
    sizes = [file.size_bytes for file in fields["files"]]
    if not all(isinstance(number, int) for number in (fields["step"], *sizes)):
        raise ValueError(f"steps and sizes must be integers in {plain}")
    if not isinstance(fields["path"], str):
        raise ValueError(f"path={fields['path']!r} must be text")
    return Entry(**fields)


def relabel(record: Record, gate: CheckpointGate, incidents: Iterable[str] = ()) -> Record:
    """Bring labels in line with the gate after it took something in.

    Args:
        incidents: identifiers to note on the checkpoints that are condemned now.
    """
    known = tuple(incidents)
    labelled = tuple(_relabelled(entry, gate, known) for entry in record.checkpoints)
    return replace(record, gate=gate.state(), checkpoints=labelled)


def _relabelled(entry: Entry, gate: CheckpointGate, incidents: tuple[str, ...]) -> Entry:
    label = gate.label(entry.saved_as)
    if entry.label in _SETTLED:
        return entry
    if label is not Label.UNPROVEN:
        return replace(entry, label=label, why=_WHY[label])
    if entry.label in (*_PROVEN, Label.CONDEMNED):
        return entry  # superseded by a newer proof, or condemned for good
    if gate.doubts.condemned:
        noted = (*entry.incidents, *incidents)
        why = _WHY[Label.CONDEMNED]
        return replace(entry, label=Label.CONDEMNED, why=why, incidents=noted)
    return replace(entry, label=Label.UNPROVEN, why=_WHY[Label.UNPROVEN])


_WHY = {
    Label.VERIFIED: "every recipe was clean in a cycle before and in a cycle after it",
    Label.UNCERTIFIED: "two cycles were clean, but part of the job is not covered",
    Label.CANDIDATE: "every recipe was clean in the cycle before it",
    Label.UNPROVEN: "nothing speaks against it",
    Label.CONDEMNED: "corruption was seen after it and before it was proven",
}


def merged(ours: Record, theirs: Record) -> Record:
    """Take over what a person changed in the file since it was read: pins, drops and damage."""
    result = ours
    for entry in theirs.checkpoints:
        if ours.entry(entry.path) is not None:
            result = result.changed(entry.path, pinned=entry.pinned)
            if entry.label in (Label.DROPPED, Label.DAMAGED):
                result = result.changed(entry.path, label=entry.label, why=entry.why)
    return result


def abandon(record: Record, newer_than: int) -> Record:
    """Mark checkpoints of later steps: the job went back and will write these steps again."""
    why = f"the job went back to step {newer_than}"
    return replace(
        record,
        checkpoints=tuple(
            replace(entry, label=Label.ABANDONED, why=why)
            if entry.step > newer_than and entry.label in _USABLE
            else entry
            for entry in record.checkpoints
        ),
    )


def choose(
    record: Record,
    failure: Failure | str,
    reachable: bool = True,
    sweep_clean: bool | None = None,
    is_intact: Callable[[Entry], bool] = lambda entry: True,
    accept_uncertified: bool = False,
) -> Choice:
    """Choose as the gate does, and step back further over checkpoints whose files are damaged.

    Args:
        is_intact: compares the files with the manifest.
        accept_uncertified: a person answers for checkpoints that could not be certified; they are
            chosen where otherwise nothing would be.
    """
    gate = CheckpointGate.from_state(dict(record.gate))
    newest, why = gate.allows_newest(failure, reachable, sweep_clean)
    labels = _USABLE if newest else (Label.VERIFIED,)
    found, damaged = _newest_intact(record, labels, is_intact)
    why += f"; damaged or gone: {', '.join(damaged)}" if damaged else ""
    if found is not None:
        return Choice("latest" if newest else "verified", found.step, found.path, why)
    if accept_uncertified:
        found, damaged = _newest_intact(record, (Label.UNCERTIFIED,), is_intact)
        if found is not None:
            why += "; uncertified, accepted by hand"
            return Choice("verified", found.step, found.path, why)
    return Choice("none", why=f"{why}; no intact checkpoint lies between two clean cycles")


def _newest_intact(
    record: Record, labels: tuple[Label, ...], is_intact: Callable[[Entry], bool]
) -> tuple[Entry | None, list[str]]:
    """Return the newest intact one, and the paths of newer ones that are not."""
    damaged: list[str] = []
    usable = [entry for entry in record.checkpoints if entry.label in labels]
    for entry in sorted(usable, key=lambda entry: entry.step, reverse=True):
        if is_intact(entry):
            return entry, damaged
        damaged.append(entry.path)
    return None, damaged


def protected(record: Record) -> frozenset[str]:
    """Paths that no purge may remove: pinned, candidate, newest proven ones and the latest."""
    gate = CheckpointGate.from_state(dict(record.gate))
    slots = (gate.latest, gate.candidate, gate.verified, gate.uncertified)
    kept = {saved.path for saved in slots if saved is not None and saved.path is not None}
    for label in _PROVEN:
        steps = [entry for entry in record.checkpoints if entry.label is label]
        kept |= {max(steps, key=lambda entry: entry.step).path} if steps else set()
    return frozenset(kept | {entry.path for entry in record.checkpoints if entry.pinned})


def purgeable(record: Record, keep_last: int) -> tuple[Entry, ...]:
    """Return the checkpoints to remove: all but the protected and the `keep_last` newest others.

    Of those in memory (absolute paths) only the protected stay.
    """
    safe = protected(record)
    others = [entry for entry in record.checkpoints if entry.path not in safe]
    kept = [entry for entry in others if not entry.path.startswith("/")]
    kept = kept[max(0, len(kept) - keep_last) :]
    return tuple(entry for entry in others if entry not in kept)
