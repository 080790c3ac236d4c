"""Which all-to-all to replay: bounded matrices that every rank builds alike.

The real split sizes of an expert all-to-all depend on the routing, so two ranks never hold the same
matrix before they have exchanged something. A replay uses a matrix that follows from the group
size and one number instead: entry (i, j) is what member i sends to member j. Every row and every
column sums to the payload, so no member sends or receives more than any other and their times
compare.

    balanced     everything to everyone, entries differ by at most 1
    cyclic       everything to one member, `shift` places on: after size - 1 shifts each ordered
                 pair has been used by itself

Each element carries the rank pair it travels between, so a receiver checks it exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scout_core.errors import ScoutError

Pattern = Literal["balanced", "cyclic"]

_MEMBER_BITS = 20
_ELEMENT_BITS = 64 - 1 - 2 * _MEMBER_BITS


@dataclass(frozen=True)
class Exchange:
    """One all-to-all replay; equal on all members, and checked to be before anybody enters it.

    Positions are those in the process group, not global ranks; counts are elements of 8 bytes.
    """

    pattern: Pattern
    matrix: tuple[tuple[int, ...], ...]
    """[i][j] elements from member i to member j; every row and column sums to the payload."""

    def __post_init__(self) -> None:
        size = len(self.matrix)
        square = size >= 1 and all(len(row) == size for row in self.matrix)
        if not square or min(map(min, self.matrix)) < 0:
            raise ScoutError(
                f"an all-to-all matrix must be square with entries >= 0: {self.matrix}"
            )
        sums = {*map(sum, self.matrix), *map(sum, zip(*self.matrix, strict=True))}
        if len(sums) > 1:
            raise ScoutError(
                f"rows and columns of an all-to-all matrix must all sum to the payload, but "
                f"{self.matrix} has sums {sorted(sums)}; some members would wait for others"
            )

    @property
    def payload(self) -> int:
        """Elements that each member sends, and receives."""
        return sum(self.matrix[0])

    @property
    def digest(self) -> str:
        """Name the exchange in a readiness vote: equal digests mean equal matrices."""
        return hashlib.sha256(repr((self.pattern, self.matrix)).encode()).hexdigest()[:16]

    def send_splits(self, position: int) -> tuple[int, ...]:
        """Elements that a member sends to each member."""
        return self.matrix[position]

    def receive_splits(self, position: int) -> tuple[int, ...]:
        """Elements that a member receives from each member."""
        return tuple(row[position] for row in self.matrix)

    def send_payload(self, position: int) -> NDArray[np.int64]:
        """Return (payload,) the tags a member sends, in order of the receivers."""
        return self._tags([(position, to, n) for to, n in enumerate(self.matrix[position])])

    def expected_payload(self, position: int) -> NDArray[np.int64]:
        """Return (payload,) the tags a member must receive, in order of the senders."""
        received = enumerate(self.receive_splits(position))
        return self._tags([(sender, position, n) for sender, n in received])

    def check(self, position: int, received: NDArray[np.int64]) -> tuple[Damage, ...]:
        """Compare what a member received, element by element.

        Returns:
            One entry per sender whose part is not what it must be; empty when all is well.

        Raises:
            ScoutError: not (payload,) elements; then it was another exchange.
        """
        expected = self.expected_payload(position)
        if received.shape != expected.shape:
            raise ScoutError(
                f"member {position} hands in {received.shape} elements of an all-to-all of "
                f"{expected.shape}; pass the output of this exchange"
            )
        damages = []
        start = 0
        for sender, count in enumerate(self.receive_splits(position)):
            part = slice(start, start + count)
            wrong = np.flatnonzero(received[part] != expected[part])
            if wrong.size:
                damages.append(Damage(sender, position, len(wrong), int(wrong[0])))
            start += count
        return tuple(damages)

    @staticmethod
    def _tags(parts: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        tags = [
            (sender << _MEMBER_BITS | receiver) << _ELEMENT_BITS | np.arange(count, dtype=np.int64)
            for sender, receiver, count in parts
        ]
        return np.concatenate(tags)


class Damage(NamedTuple):
    """Elements of one sender that did not arrive as sent."""

    sender: int  # position in the group
    receiver: int
    elements: int
    first: int  # place of the first one in the sender's part


def balanced(size: int, payload: int) -> Exchange:
    """Return the exchange of everyone with everyone.

    Args:
        payload: elements that each member sends. What `size` does not divide goes to the next
            members on, so that columns sum to the payload as rows do.
    """
    _check(size, payload)
    share, rest = divmod(payload, size)
    return Exchange("balanced", _circulant([share + (k < rest) for k in range(size)]))


def cyclic(size: int, payload: int, shift: int) -> Exchange:
    """Return the exchange in which member i sends everything to member (i + shift) mod size.

    Raises:
        ScoutError: the shift is not in 1 .. size - 1; a member does not send to itself.
    """
    _check(size, payload)
    if not 1 <= shift < size:
        raise ScoutError(f"shift={shift} of a cyclic all-to-all must be in 1 .. {size - 1}")
    return Exchange("cyclic", _circulant([payload if k == shift else 0 for k in range(size)]))


def exchange_of_turn(size: int, turn: int, seen_bytes: int, bound_bytes: int) -> Exchange:
    """Return what the replay number `turn` of one observed all-to-all exchanges.

    A cycle has `size` turns: balanced, then every shift.

    Args:
        turn: from 0.
        seen_bytes: what a member sent in the real one. Members saw different numbers, so they
            agree on one (the largest) first.
        bound_bytes: most bytes that a member may send in a replay.
    """
    for name, value in (("seen_bytes", seen_bytes), ("bound_bytes", bound_bytes)):
        if value < 1:
            raise ScoutError(f"{name}={value} of an all-to-all replay must be >= 1")
    payload = max(min(seen_bytes, bound_bytes) // 8, 1)
    shift = turn % size
    return cyclic(size, payload, shift) if shift else balanced(size, payload)


def refusal(digests: Mapping[int, str]) -> str:
    """Say why the group must not enter an exchange, or return "" when it may.

    Args:
        digests: rank -> `Exchange.digest` from the readiness vote. A matrix that depends on the
            rank would leave members waiting for data that nobody sends.
    """
    ranks: dict[str, list[int]] = {}
    for rank, digest in sorted(digests.items()):
        ranks.setdefault(digest, []).append(rank)
    if len(ranks) <= 1:
        return ""
    camps = "; ".join(f"ranks {members} have {digest}" for digest, members in ranks.items())
    return f"the all-to-all matrix depends on the rank, so nobody enters it: {camps}"


def _circulant(row: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the matrix whose entry (i, j) is row[(j - i) mod size]: all its sums are equal."""
    size = len(row)
    return tuple(tuple(row[(j - i) % size] for j in range(size)) for i in range(size))


def _check(size: int, payload: int) -> None:
    for name, value, bits in (
        ("size", size, _MEMBER_BITS),
        ("payload", payload, _ELEMENT_BITS),
    ):
        if not 1 <= value < 1 << bits:
            raise ScoutError(
                f"{name}={value} of an all-to-all replay must be in 1 .. {(1 << bits) - 1}"
            )
