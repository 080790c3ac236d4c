"""The words in which checkpoints are judged: outcomes, failures, labels, choices."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from scout_core.errors import ScoutError


class Outcome(enum.Enum):
    """What one check came to, in ascending order of gravity."""

    CLEAN = "clean"  # every exact comparison agreed, the state audit included
    STRAGGLER = "straggler"  # the same, but some rank was slow: nothing against the state
    INCONCLUSIVE = "inconclusive"  # an exact comparison was not clean, and names nobody
    HANG = "hang"  # the job made no progress
    SDC = "sdc"  # an exact comparison names a corrupt rank

    @classmethod
    def gravest(cls, outcomes: Iterable[Outcome]) -> Outcome:
        """Return the outcome of the job from its ranks': one group's fault is everybody's."""
        return max(outcomes, key=list(cls).index)


class Failure(enum.Enum):
    """Why a checkpoint is needed."""

    SDC = "sdc"
    STRAGGLER = "straggler"
    HANG = "hang"
    UNREACHABLE = "unreachable"  # a machine is gone, with the state it held
    UNKNOWN = "unknown"  # the job ended without a word
    NONE = "none"  # none: a planned stop


class Label(enum.Enum):
    """How far a checkpoint can be trusted."""

    UNPROVEN = "unproven"  # complete, and nothing speaks against it
    CANDIDATE = "candidate"  # saved after a clean cycle; the next clean cycle proves it
    VERIFIED = "verified"  # between two complete clean cycles
    UNCERTIFIED = "uncertified"  # no proof: part of the job is not covered, or the record was lost
    CONDEMNED = "condemned"  # newer than the last proof before a corruption was seen
    REFUSED = "refused"  # not to be taken: the job hangs or a machine is gone
    ABANDONED = "abandoned"  # newer than the checkpoint that the job went back to
    DAMAGED = "damaged"  # its files differ from what was saved
    DROPPED = "dropped"  # a person ruled it out


class Saved(NamedTuple):
    """A complete checkpoint."""

    step: int  # optimizer step whose end it holds
    path: str | None = None


@dataclass(frozen=True)
class Choice:
    """The checkpoint to restart from. `step` is None exactly when there is none."""

    choice: Literal["latest", "verified", "none"]
    step: int | None = None
    path: str | None = None
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        assert (self.step is None) == (self.choice == "none")


Word = TypeVar("Word", bound=enum.Enum)


def word(kind: type[Word], value: Word | str, name: str) -> Word:
    """Read one of the words above.

    Raises:
        ScoutError: no such word; `name` says which argument it was.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ScoutError(f"{name}={value!r} must be one of {known}") from None
