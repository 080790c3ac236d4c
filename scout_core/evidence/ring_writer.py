"""The trainer's side of the progress ring: publish in well under a microsecond, never block.

The layout and its guarantees are in `evidence.ring`.
"""

from __future__ import annotations

import mmap
import os
import threading
from time import monotonic_ns

from scout_core.evidence.ring import (
    COLLECTIVE,
    COMPLETED_WORD,
    COMPLETIONS,
    DONE_WORD,
    END,
    END_TEXT,
    END_TIME,
    ENTERED_WORD,
    GROUP,
    GROUP_AT,
    GROUP_HEAD,
    GROUP_SLOTS,
    GROUP_STRIDE,
    HEADER,
    LAST_COMPLETION,
    LOST,
    MAGIC,
    MAX_TEXT_BYTES,
    NO_PEER,
    OPERATION,
    OPERATION_HEAD,
    OPERATION_SLOTS,
    OPERATION_STRIDE,
    OPERATIONS_AT,
    ORDER,
    ORDER_AT,
    ORDER_HEAD,
    ORDER_SLOTS,
    ORDER_STRIDE,
    PROGRESS,
    PROGRESS_AT,
    PROGRESS_HEAD,
    PROGRESS_SLOTS,
    PROGRESS_STRIDE,
    SIZE_BYTES,
    TEXT_AT,
    UNKNOWN_TEXT,
    UNTRACKED,
    compress_ranks,
)


class RingWriter:
    """Writes one ring. Thread-safe, and safe when a signal handler publishes in between."""

    def __init__(self, rank: int) -> None:
        """Create an anonymous memory file, which is gone with its last user."""
        self.descriptor = os.memfd_create(f"scout-ring-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, SIZE_BYTES)
        self._memory = mmap.mmap(self.descriptor, SIZE_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        # Reentrant: a signal handler may run a collective while this thread publishes.
        self._lock = threading.RLock()
        self._progress_head = 0
        self._operation_head = 0
        self._text_end = 0
        self._texts: dict[str, int] = {}
        HEADER.pack_into(self._memory, 0, MAGIC, rank)
        self.text(UNKNOWN_TEXT)  # id 0

    def text(self, value: str) -> int:
        """Return the id of a text, which is stored once; 0 when it does not fit."""
        known = self._texts.get(value)
        if known is not None:
            return known
        data = value.encode("utf-8", "replace")
        with self._lock:
            start = self._text_end
            end = start + 8 + (len(data) + 7) // 8 * 8
            if TEXT_AT + end > SIZE_BYTES or len(data) > MAX_TEXT_BYTES:
                self._words[LOST] += 1
                return 0
            at = TEXT_AT + start
            self._words[at // 8] = len(data)
            self._memory[at + 8 : at + 8 + len(data)] = data
            self._text_end = end
            self._texts[value] = start // 8
            return start // 8

    def progress(self, step: int, phase: int, operation: int, detail: int = 0) -> None:
        """Publish where the trainer is.

        Args:
            step: optimizer step.
            phase, detail: ids of texts.
            operation: counts boundaries inside the step; 32 bits are kept.
        """
        with self._lock:
            number = self._progress_head = self._progress_head + 1
            PROGRESS.pack_into(
                self._memory,
                PROGRESS_AT + number % PROGRESS_SLOTS * PROGRESS_STRIDE,
                number,
                monotonic_ns(),
                step,
                phase,
                operation & 0xFFFFFFFF,
                detail,
            )
            # The attribute, not the local: a handler in between may have published a later one.
            self._words[PROGRESS_HEAD] = self._progress_head

    def add_group(self, name: str, ranks: tuple[int, ...], backend: str) -> int:
        """Add a process group and return its index; -1 when the table is full."""
        texts = self.text(name), self.text(compress_ranks(ranks)), self.text(backend)
        with self._lock:
            index = self._words[GROUP_HEAD]
            if index == GROUP_SLOTS:
                self._words[LOST] += 1
                return -1
            GROUP.pack_into(self._memory, GROUP_AT + index * GROUP_STRIDE, *texts)
            self._words[GROUP_HEAD] = index + 1
            return index

    def add_order(self, group: int, kind: int = COLLECTIVE, peer: int = NO_PEER) -> int:
        """Add what counts operations together, and return its index.

        Returns:
            -1 when the table is full or `group` is -1; its operations cannot be published then.
        """
        with self._lock:
            index = self._words[ORDER_HEAD]
            if group < 0 or index == ORDER_SLOTS:
                self._words[LOST] += 1
                return -1
            at = ORDER_AT + index * ORDER_STRIDE
            ORDER.pack_into(self._memory, at, 0, 0, group, peer, kind)
            self._words[ORDER_HEAD] = index + 1
            return index

    def enter(
        self,
        order: int,
        sequence: int,
        operation: int,
        *,
        numel: int = -1,
        tag: int = 0,
        step: int = 0,
        phase: int = 0,
        site: int = 0,
    ) -> int:
        """Publish an operation before it starts; returns its number.

        Args:
            order: index from `add_order`.
            operation, phase, site: ids of texts.
        """
        with self._lock:
            number = self._operation_head = self._operation_head + 1
            OPERATION.pack_into(
                self._memory,
                OPERATIONS_AT + number % OPERATION_SLOTS * OPERATION_STRIDE,
                number,
                monotonic_ns(),
                0,
                sequence,
                step,
                numel,
                tag,
                order,
                operation,
                site,
                phase,
            )
            self._words[(ORDER_AT + order * ORDER_STRIDE) // 8 + ENTERED_WORD] = sequence
            self._words[OPERATION_HEAD] = self._operation_head
            return number

    def complete(
        self, number: int, order: int, completed: int | None, *, progress: bool = True
    ) -> None:
        """Mark an operation complete.

        Args:
            number: from `enter`; its slot may have been used again since.
            completed: as for `set_completed`.
            progress: it has just completed; False when that may be long ago.
        """
        now = monotonic_ns()
        with self._lock:
            words = self._words
            if self._operation_head - number < OPERATION_SLOTS:
                at = OPERATIONS_AT + number % OPERATION_SLOTS * OPERATION_STRIDE
                words[at // 8 + DONE_WORD] = now
            self.set_completed(order, completed)
            if progress:
                words[LAST_COMPLETION] = now
                words[COMPLETIONS] += 1

    def set_completed(self, order: int, completed: int | None) -> None:
        """Say that everything in an order up to a number is complete; None: unknown."""
        value = UNTRACKED if completed is None else completed
        self._words[(ORDER_AT + order * ORDER_STRIDE) // 8 + COMPLETED_WORD] = value

    def end(self, state: int, reason: str = "") -> None:
        """Say that the trainer ends: CLOSED, FAILED or EXITING."""
        self._words[END_TEXT] = self.text(reason)
        self._words[END_TIME] = monotonic_ns()
        self._words[END] = state

    @property
    def ended(self) -> int:
        """RUNNING, or how `end` was called."""
        return self._words[END]

    def close(self) -> None:
        """Give this process's handle back; an agent that has the file open can still read it."""
        os.close(self.descriptor)
