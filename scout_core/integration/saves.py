"""What the gate service is told and answers; equal on all ranks unless a field says otherwise."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from scout_core.decision.labels import Choice, Failure, Label


@dataclass(frozen=True)
class Job:
    """What the gate must know of a job; equal on all ranks."""

    catalog_size: int
    """K: recipes of one cycle; 0 when nothing can be replayed."""
    uncovered: tuple[str, ...] = ()
    """What no check sees, one sentence each; then nothing is called verified."""
    name: str = ""
    topology: str = ""
    """Digest of the addresses of all ranks."""


class Plan(NamedTuple):
    """What a save would come to now; equal on all ranks."""

    label: Label
    path: str


class Chosen(NamedTuple):
    """Where to start from; equal on all ranks."""

    choice: Choice
    """With an absolute path."""
    failure: Failure
    """What it answers."""
    num_checkpoints: int
    """Checkpoints in the record, trusted or not."""


RemoveFiles = Callable[[pathlib.Path], None]
"""Deletes a checkpoint's folder; called in a thread of rank 0."""


class Purge(NamedTuple):
    """Which checkpoints to remove: all but the protected and the newest others."""

    keep_last: int
    remove_files: RemoveFiles


class Pending(NamedTuple):
    """A save that was begun and has not ended on every rank."""

    step: int
    path: str
    outcome: Callable[[], str | None]  # None while running, "" when done, else what went wrong


class Ended(NamedTuple):
    """A save that ended on every rank."""

    step: int
    path: str
    label: Label
    error: str = ""
    """What went wrong on the ranks where it failed; then the label is REFUSED."""
