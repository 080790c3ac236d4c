"""Watch that low-precision parameters equal their fp32 masters cast down, without any peer.

# Note [Master coherence]

A sharded parameter has one owner. When its memory is corrupted, all peers gather the same wrong
values, all replays agree, and no vote sees it; the next update then overwrites the evidence with a
new cast of the master, while the gradient that was computed with it stays. The owner itself can
tell: from one update to the next a parameter must equal `master.to(parameter.dtype)`, bit by bit.

So the watch looks just before every update, when the parameters have served a forward and a
backward pass, and keeps the first mismatch of each pair on the device: 5 small kernels per 16 M
elements, no synchronisation, nothing on the wire. The next check reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scout_core.decision.coherence import Incoherent

_PIECE_ELEMENTS = 1 << 24  # bounds the scratch memory of one comparison to 80 MB
_NOWHERE = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class MasterPair:
    """Parameters and the masters that they are cast from, on one device of this rank."""

    held: torch.Tensor
    """(n,) contiguous; what forward and backward compute with."""
    master: torch.Tensor
    """(n,) contiguous; what the optimizer updates, usually float32."""
    parts: tuple[tuple[str, int], ...]
    """Name and number of elements of each parameter, in order; what is left over is padding."""
    owners: int
    """Ranks among which each parameter is spread; 1 when this rank alone has its master."""


Pairs = Callable[[], Sequence[MasterPair]]


class CoherenceWatch:
    """Looks at the pairs of one rank and remembers the first mismatch of each."""

    def __init__(self, pairs: Pairs) -> None:
        """Look for the first time; pairs that differ already are not watched.

        Args:
            pairs: lists the pairs, the same ones in the same order at each call.
        """
        self._pairs = pairs
        self._marks: list[torch.Tensor] = []
        self._skipped: frozenset[int] = frozenset()
        self.look(0)
        self._skipped = frozenset(i for i, mark in enumerate(self._marks) if int(mark[0]))
        self.clear()

    @property
    def is_empty(self) -> bool:
        """There is nothing to watch."""
        return len(self._marks) == len(self._skipped)

    def gaps(self) -> list[str]:
        """Name the parameters that are not watched, one sentence per pair."""
        pairs = [pair for i, pair in enumerate(self._pairs()) if i in self._skipped]
        firsts = [(pair.parts[0][0], len(pair.parts) - 1) for pair in pairs]
        return [f"{name} and {n} more differed from their masters at start" for name, n in firsts]

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Compare all pairs now; queues work on the device and waits for nothing.

        Args:
            step: optimizer steps that have ended.
        """
        pairs = self._pairs()
        if not self._marks:
            self._marks = [_blank(pair.held.device) for pair in pairs]
        assert len(pairs) == len(self._marks)
        for index, pair in enumerate(pairs):
            if index not in self._skipped:
                old, new = self._marks[index], _mark(pair, step)
                self._marks[index] = torch.where(old[0] > 0, old, new)

    def found(self) -> tuple[Incoherent, ...]:
        """Return what was seen since `clear`, one entry per pair; waits for the device."""
        pairs = self._pairs()
        seen = []
        for pair, mark in zip(pairs, self._marks, strict=True):
            changed, first, step = mark.tolist()
            if changed:
                name, elements = _part_at(pair, first)
                seen.append(Incoherent(name, step, changed, elements, pair.owners))
        return tuple(seen)

    def clear(self) -> None:
        """Forget what was seen."""
        self._marks = [_blank(mark.device) for mark in self._marks]


def _blank(device: torch.device) -> torch.Tensor:
    """(changed elements, index of the first, step) of a pair that is coherent."""
    return torch.tensor([0, _NOWHERE, 0], dtype=torch.int64, device=device)


def _mark(pair: MasterPair, step: int) -> torch.Tensor:
    device = pair.held.device
    changed = torch.zeros((), dtype=torch.int64, device=device)
    first = torch.full((), _NOWHERE, dtype=torch.int64, device=device)
    for start in range(0, pair.held.numel(), _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        differs = _differs(pair.held[piece], pair.master[piece])
        count = differs.sum()
        place = torch.where(count > 0, differs.to(torch.uint8).argmax() + start, _NOWHERE)
        changed, first = changed + count, torch.minimum(first, place)
    return torch.stack([changed, first, torch.full_like(changed, step)])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differs(held: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Compare bits; a NaN equals any NaN, because casts may change its payload."""
    cast = master.to(held.dtype)
    bits = _BITS[held.element_size()]
    return (held.view(bits) != cast.view(bits)) & ~(held.isnan() & cast.isnan())


def _part_at(pair: MasterPair, index: int) -> tuple[str, int]:
    """Return name and size of the parameter that an element of the pair belongs to."""
    end = 0
    for name, size in pair.parts:
        end += size
        if index < end:
            return name, size
    return "padding", pair.held.numel() - end
