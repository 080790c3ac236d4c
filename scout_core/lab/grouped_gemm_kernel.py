"""A grouped GEMM in Triton that counts the branches it takes (`decision.schedule.Role`).

Importing this module needs triton. Only `lab.grouped_gemm` imports it.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

TABLE_COLUMNS = 6  # rows, columns, reduction; offsets of A, B and OUT in elements


@functools.cache
def kernel(interpreted: bool) -> Any:
    """Return the kernel, compiled for the GPU or run by Triton's interpreter on the CPU.

    Nothing global changes: the interpreter is chosen for this kernel alone. For its sake the kernel
    calls no function that triton itself has compiled, such as `tl.cdiv`.
    """
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        return triton.jit(_grouped_gemm)


def _grouped_gemm(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    counters: tl.tensor,
    table: tl.tensor,
    experts: tl.tensor,
    programs: tl.tensor,
    a_row: tl.tensor,
    a_reduction: tl.tensor,
    b_reduction: tl.tensor,
    b_column: tl.tensor,
    out_row: tl.tensor,
    out_slice: tl.tensor,
    TM: tl.constexpr,  # noqa: N803 -- Triton's custom for constants
    TN: tl.constexpr,  # noqa: N803
    TK: tl.constexpr,  # noqa: N803
    SLICES: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
) -> None:
    # Tail rows and columns are computed from the last valid one, so only their store is masked.
    # One function, because a function it called would be bound to one of compiler and interpreter.
    program = tl.program_id(0).to(tl.int64)  # with 32 bits, offsets of large operands overflow
    started, resume, enter = 0, 0, 0
    interior, row_tails, column_tails, corners = 0, 0, 0, 0
    full_steps, tail_steps, empty = 0, 0, 0
    tile = program
    base = program * 0
    for expert in range(experts):
        entry = table + expert * 6
        rows = tl.load(entry)
        columns = tl.load(entry + 1)
        reduction = tl.load(entry + 2)
        across = (columns + TN - 1) // TN
        tiles = ((rows + TM - 1) // TM) * across * SLICES
        if tile < base + tiles:
            enter += 1
        while tile < base + tiles:
            part = (tile - base) % SLICES
            block = (tile - base) // SLICES
            row = (block // across) * TM + tl.arange(0, TM)
            column = (block % across) * TN + tl.arange(0, TN)
            steps = (reduction + TK - 1) // TK
            if EVEN:
                begin = steps * part // SLICES
                end = steps * (part + 1) // SLICES
            else:
                length = (steps + SLICES - 1) // SLICES
                begin = tl.minimum(part * length, steps)
                end = tl.minimum((part + 1) * length, steps)
            full_end = tl.minimum(end, reduction // TK)
            depth = tl.arange(0, TK)
            a_rows = a + tl.load(entry + 3) + tl.minimum(row, rows - 1)[:, None] * a_row
            b_columns = b + tl.load(entry + 4) + tl.minimum(column, columns - 1)[None, :] * b_column
            total = tl.full((TM, TN), 0.0, dtype=tl.float32)
            for step in range(begin, full_end):
                k = step * TK + depth
                left = tl.load(a_rows + k[None, :] * a_reduction)
                right = tl.load(b_columns + k[:, None] * b_reduction)
                total = tl.dot(left, right, total, input_precision="ieee")
                full_steps += 1
            if full_end < end:
                k = full_end * TK + depth
                exists = k < reduction
                left = tl.load(a_rows + k[None, :] * a_reduction, mask=exists[None, :], other=0.0)
                right = tl.load(b_columns + k[:, None] * b_reduction, exists[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
                tail_steps += 1
            if begin == end:
                empty += 1
            place = out + tl.load(entry + 5) + part * out_slice + row[:, None] * out_row
            place = place + column[None, :]
            last_row = (block // across) * TM + TM
            last_column = (block % across) * TN + TN
            if (last_row <= rows) & (last_column <= columns):
                tl.store(place, total)
                interior += 1
            else:
                tl.store(place, total, (row < rows)[:, None] & (column < columns)[None, :])
                if last_column <= columns:
                    row_tails += 1
                elif last_row <= rows:
                    column_tails += 1
                else:
                    corners += 1
            if tile >= programs:
                resume += 1
            else:
                started += 1
            tile += programs
        base += tiles
    own = counters + program * 10
    tl.store(own, started)
    tl.store(own + 1, resume)
    tl.store(own + 2, enter)
    tl.store(own + 3, interior)
    tl.store(own + 4, row_tails)
    tl.store(own + 5, column_tails)
    tl.store(own + 6, corners)
    tl.store(own + 7, full_steps)
    tl.store(own + 8, tail_steps)
    tl.store(own + 9, empty)
