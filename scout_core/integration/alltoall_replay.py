"""Replay of the all-to-alls that training runs: same members, agreed sizes, a payload that tells.

Which groups run one, and how large, is seen by the c10d observer. The replay runs on SCOUT's own
groups of the same ranks, never on the training communicator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from scout_core.decision import alltoall
from scout_core.decision.alltoall import Exchange as Matrix
from scout_core.decision.alltoall_verdict import Pair
from scout_core.evidence.clock import Clock
from scout_core.evidence.collectives import Operation, Pending
from scout_core.evidence.exchange import Exchange, Ranks

ALL_TO_ALLS = frozenset({"all_to_all", "all_to_all_single"})


class AllToAllWatch:
    """Notes which groups of this rank run an all-to-all; a `collectives.Listener`."""

    def __init__(self) -> None:
        self.sizes_bytes: dict[Ranks, int] = {}
        """Largest payload by members, global ranks ascending."""
        self.counting = True
        """False while SCOUT itself communicates."""
        self.lost = ""
        """Why nothing more is seen."""

    def entered(self, operation: Operation) -> None:
        """Note an all-to-all."""
        if operation.name not in ALL_TO_ALLS or not self.counting or operation.dtype is None:
            return
        ranks = tuple(sorted(operation.group.ranks))
        size = operation.own_numel * operation.dtype.itemsize
        if len(ranks) > 1 and size > self.sizes_bytes.get(ranks, 0):
            self.sizes_bytes[ranks] = size

    def completed(self, operation: Operation, note: Any) -> None:
        """Nothing is kept until completion."""

    def certain(self, order: Pending) -> None:
        """Nothing here depends on what is pending."""

    def disarmed(self, reason: str) -> None:
        """Keep what was seen."""
        self.lost = reason


class Seen(NamedTuple):
    """One replay as this rank saw it."""

    seconds: float | None  # None when nobody entered it
    damaged: tuple[Pair, ...] = ()
    refused: str = ""  # why nobody entered it


class AllToAllReplay:
    """Replays the all-to-alls of all groups, turn by turn; all ranks of the job agree on them."""

    def __init__(
        self, exchange: Exchange, clock: Clock, watch: AllToAllWatch, bound_bytes: int
    ) -> None:
        """Start without groups.

        Args:
            bound_bytes: most bytes that a member sends in one replay.
        """
        self._exchange = exchange
        self._clock = clock
        self._watch = watch
        self._bound_bytes = bound_bytes
        self._everyone = tuple(range(exchange.world_size))
        self._told: dict[Ranks, int] = {}
        self._sizes: dict[Ranks, int] = {}
        self._turn = 0

    @property
    def groups(self) -> tuple[Ranks, ...]:
        """Members of every group in the job that runs an all-to-all; equal on all ranks."""
        return tuple(sorted(self._sizes))

    def agree(self) -> None:
        """Learn what the other ranks have seen, and go on to the next turn; collective."""
        mine = dict(self._watch.sizes_bytes)
        self._turn += 1
        if any(self._exchange.all_reduce_max([mine.keys() != self._told.keys()])):
            payload = json.dumps(list(mine.items())).encode()
            for part in self._exchange.all_gather(payload, self._everyone):
                for ranks, size in json.loads(part):
                    members = tuple(ranks)
                    self._sizes[members] = max(size, self._sizes.get(members, 0))
            self._told = mine

    def run(self, ranks: Ranks, device: torch.device, repeats: int, balanced: bool = False) -> Seen:
        """Replay this rank's all-to-all in a group of `groups`; collective in the group.

        Args:
            repeats: the fastest counts.
            balanced: everyone sends to everyone, whatever the turn.
        """
        place = ranks.index(self._exchange.rank)
        turn = 0 if balanced else self._turn
        matrix = alltoall.exchange_of_turn(len(ranks), turn, self._sizes[ranks], self._bound_bytes)
        told = self._exchange.all_gather(matrix.digest.encode(), ranks)
        digests = {rank: part.decode() for rank, part in zip(ranks, told, strict=True)}
        refused = alltoall.refusal(digests)
        if refused:
            return Seen(None, refused=refused)
        self._watch.counting = False
        seconds, received = self._timed(matrix, place, ranks, device, repeats)
        self._watch.counting = True
        damages = matrix.check(place, received.cpu().numpy())
        return Seen(seconds, tuple((ranks[d.sender], ranks[d.receiver]) for d in damages))

    def _timed(
        self, matrix: Matrix, place: int, ranks: Ranks, device: torch.device, repeats: int
    ) -> tuple[float, torch.Tensor]:
        sent = torch.from_numpy(matrix.send_payload(place)).to(device)
        splits: tuple[Sequence[int], Sequence[int]] = (
            matrix.send_splits(place),
            matrix.receive_splits(place),
        )
        received = torch.empty(matrix.payload, dtype=torch.int64, device=device)
        times = []
        for _ in range(repeats):
            received.zero_()
            self._exchange.barrier(ranks)
            timing = self._clock.measure(
                lambda: self._exchange.all_to_all(sent, received, splits, ranks)
            )
            times.append(timing.wall_s)
        return min(times), received
