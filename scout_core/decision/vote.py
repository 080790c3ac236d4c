"""The readiness vote: before any replay collective everybody agrees, or nobody enters.

Every rank says which call it holds; from the same votes every rank derives the
same ballot. A rank that did other work than its peers is named here, as not_comparable.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scout_core.errors import ScoutError


@dataclass(frozen=True)
class Vote:
    """What one rank could replay."""

    step: int
    recipe: str
    has_site: bool = True
    """False on a pipeline stage that has no such module: it sits this check out."""
    ready: bool = True
    why_not: str = ""
    """Why not ready."""
    fixable: bool = True
    """False when the reason is a property of the code (unknown argument type): retire it."""
    site: str = ""
    skeleton: str = ""
    """Nesting and kinds of the arguments; see `evidence.capture.Arguments`."""
    modes: str = ""
    """Autocast and training mode."""
    constants: tuple[Any, ...] = ()
    leaves: tuple[tuple[str, tuple[int, ...], bool, tuple[int, ...]], ...] = ()
    """Per tensor argument: dtype, local shape, needs gradient, global shape of a DTensor."""
    rows: tuple[int, ...] = ()
    """Rows per local expert of the call, for an expert stage whose calls can be read."""
    schedule: str = ""
    """What must be equal for the same rows to execute the same: kernels, and rows when planned."""
    broken: str = ""
    """An internal error of SCOUT on this rank; everybody then switches SCOUT off."""
    units: tuple[str, ...] = field(default=())
    """Names of the state units audited at this check."""

    def to_wire(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> Vote:
        """Decode.

        Raises:
            ScoutError: written by another version of SCOUT.
        """
        try:
            plain = json.loads(data)
            plain["constants"] = tuple(plain["constants"])
            plain["units"] = tuple(plain["units"])
            plain["rows"] = tuple(plain["rows"])
            plain["leaves"] = tuple(
                (dtype, tuple(shape), needs_grad, tuple(whole))
                for dtype, shape, needs_grad, whole in plain["leaves"]
            )
            return cls(**plain)
        except (ValueError, TypeError, KeyError) as error:
            raise ScoutError(
                f"a peer's vote cannot be read ({error}); all ranks must run the same SCOUT"
            ) from error


@dataclass(frozen=True)
class Dissent:
    """Ranks that hold other work than their peers."""

    reason: str
    """"WORK_SKIPPED" or "WORK_DIFFERS"."""
    ranks: tuple[int, ...]
    """The minority, as global ranks; empty when no strict majority holds the same."""
    text: str


@dataclass(frozen=True)
class Ballot:
    """What the votes of a group of ranks come to."""

    enter: bool
    """All members can replay together (or none of them has a site)."""
    dissent: Dissent | None = None
    retire: str = ""
    """Why this recipe can never be replayed; empty when it may be tried again."""
    absent: str = ""
    """Why no rank has a call to replay this time: retire it when that lasts."""
    remark: str = ""
    """Something the user should know that does not stop the replay."""
    broken: str = ""
    """An internal error: switch SCOUT off."""


def count(votes: Mapping[int, Vote]) -> Ballot:
    """Decide from the votes of one work group.

    Args:
        votes: by global rank; all ranks that do the same work.
    """
    everyone = sorted(votes)
    broken = [f"rank {rank}: {votes[rank].broken}" for rank in everyone if votes[rank].broken]
    if broken:
        return Ballot(False, broken="; ".join(broken))
    turns = {(vote.step, vote.recipe) for vote in votes.values()}
    if len(turns) > 1:
        return Ballot(False, broken=f"ranks disagree on step and recipe: {sorted(turns)}")
    if not any(vote.has_site for vote in votes.values()):
        return Ballot(True)
    different = _difference(votes, lambda vote: (vote.has_site, vote.site), "WORK_DIFFERS")
    if different:
        return Ballot(False, dissent=different)
    if not all(vote.ready for vote in votes.values()):
        return _not_ready(votes)
    for what in (lambda v: v.skeleton, lambda v: v.modes, lambda v: v.schedule, _kinds):
        different = _difference(votes, what, "WORK_DIFFERS")
        if different:
            return Ballot(False, dissent=different)
    shapes = {tuple(leaf[1] for leaf in vote.leaves) for vote in votes.values()}
    routed = any(
        vote.rows for vote in votes.values()
    )  # every rank has other tokens for its experts
    differ = len(shapes) > 1 and not routed
    remark = "input shapes differ between ranks: all replay the source's" if differ else ""
    return Ballot(True, remark=remark)


def _not_ready(votes: Mapping[int, Vote]) -> Ballot:
    late = {rank: vote for rank, vote in votes.items() if not vote.ready}
    reasons = sorted({vote.why_not for vote in late.values()})
    if any(not vote.fixable for vote in late.values()):
        return Ballot(False, retire="; ".join(reasons))
    if len(late) == len(votes):
        return Ballot(False, absent="; ".join(reasons))
    if 2 * len(late) < len(votes):
        ranks = tuple(sorted(late))
        text = f"{'; '.join(reasons)}, while {len(votes) - len(late)} peers have it"
        return Ballot(False, dissent=Dissent("WORK_SKIPPED", ranks, text))
    return Ballot(False, dissent=Dissent("WORK_SKIPPED", (), "; ".join(reasons)))


def _kinds(vote: Vote) -> Hashable:
    """What must be equal of the tensor arguments: everything but the shapes' sizes."""
    return tuple((dtype, len(shape), needs) for dtype, shape, needs, _ in vote.leaves)


def _difference(
    votes: Mapping[int, Vote], what: Callable[[Vote], Hashable], reason: str
) -> Dissent | None:
    values = {rank: what(vote) for rank, vote in votes.items()}
    if len(set(values.values())) == 1:
        return None
    majority, size = Counter(values.values()).most_common(1)[0]
    minority = tuple(sorted(rank for rank, value in values.items() if value != majority))
    if 2 * size <= len(votes):
        minority = ()
    shown = sorted({repr(value) for value in values.values()})
    return Dissent(reason, minority, f"peers hold different work: {' / '.join(shown)[:300]}")


def source_of(peers: Sequence[int], round_: int) -> int:
    """Return the global rank whose call is replayed: the same position in every peer group.

    Peer groups of one job are laid out alike, so the same position is the same (d, s) place, and
    members of a tensor-parallel group take their inputs from one replica.
    """
    return peers[round_ % len(peers)]
