"""Rows per expert of every call, kept where they are until somebody looks.

Routing decides on the device how many rows each expert gets. Reading that would make the host wait,
so the log copies device counts into a bounded buffer beside them, in stream order, and reads the
buffer once per look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from scout_core.decision.expert_replay import Rows

Counts = torch.Tensor | Sequence[int]
"""Rows per local expert, as a call carries them: on the host or on the device."""
CAPACITY_CALLS = 8192


class Taken(NamedTuple):
    """What was executed since the last look."""

    calls: list[tuple[int, Rows]]  # (optimizer step, rows), in order
    missed_rows: int  # of calls beyond the capacity


class RowLog:
    """Calls of the expert stages of one class on this rank."""

    def __init__(self, num_experts: int, capacity_calls: int = CAPACITY_CALLS) -> None:
        """Start empty; a call needs 8 bytes per expert on the device."""
        self.seen = 0
        """Calls so far."""
        self._num_experts = num_experts
        self._capacity = capacity_calls
        self._host: list[tuple[int, Rows | int]] = []  # int: a line of the device buffer
        self._buffer: torch.Tensor | None = None
        self._lines = 0
        self._missed_rows = 0

    def add(self, step: int, counts: Counts, total_rows: int) -> None:
        """Keep the counts of one call; never waits for a device.

        Args:
            step: optimizer step under way, from 1.
            total_rows: what the host knows of their sum, paddings included.

        Raises:
            ValueError: not one count per local expert.
        """
        if len(counts) != self._num_experts:
            raise ValueError(
                f"a call carries {len(counts)} row counts for {self._num_experts} local experts"
            )
        self.seen += 1
        if len(self._host) == self._capacity:
            self._missed_rows += total_rows
        elif isinstance(counts, torch.Tensor) and counts.device.type != "cpu":
            self._host.append((step, self._keep(counts)))
        else:
            self._host.append((step, rows_of(counts)))

    def take(self) -> Taken:
        """Return what was kept, and forget it; waits for the device when it holds counts."""
        lines: list[list[int]] = []
        if self._buffer is not None and self._lines:
            torch.accelerator.synchronize(self._buffer.device)  # calls may have used other streams
            lines = self._buffer[: self._lines].tolist()
        calls = [
            (step, tuple(lines[rows]) if isinstance(rows, int) else rows)
            for step, rows in self._host
        ]
        taken = Taken(calls, self._missed_rows)
        self._host, self._lines, self._missed_rows = [], 0, 0
        return taken

    def _keep(self, counts: torch.Tensor) -> int:
        if self._buffer is None:
            size = (self._capacity, self._num_experts)
            self._buffer = torch.empty(size, dtype=torch.int64, device=counts.device)
        line, self._lines = self._lines, self._lines + 1
        self._buffer[line].copy_(counts.detach(), non_blocking=True)
        return line


def rows_of(counts: Counts) -> Rows:
    """Read row counts; waits for the device when they are there."""
    plain = counts.tolist() if isinstance(counts, torch.Tensor) else counts
    return tuple(int(n) for n in plain)
