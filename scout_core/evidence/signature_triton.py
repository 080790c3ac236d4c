"""SCOUT64's row digests as one Triton kernel: every byte is read once, nothing is written but D."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from scout_core.evidence.scout64 import FMIX_1, FMIX_2, LOW_31, LOW_35, ROW_WORDS, Tables

_BLOCK_WORDS = 4096  # words of one program in flight
_ROWS_OF_LARGE = 4  # rows that share one read of the multipliers, which are three times the data
_LARGE = 1024  # rows of a tensor from which sharing still leaves a program for every processor


def row_digests_fused(words: Tensor, tables: Tables, rows_per_program: int | None = None) -> Tensor:
    """Return what `scout64.row_digests_eager` returns, bit for bit.

    Args:
        words: (n,) int64, contiguous, n >= 1; the last row may be shorter.
        rows_per_program: a power of two; None chooses by size.
    """
    rows = -(-words.numel() // ROW_WORDS)
    shared = rows_per_program or (_ROWS_OF_LARGE if rows >= _LARGE else 1)
    out = torch.empty(rows, dtype=torch.int64, device=words.device)
    on_device = torch.cuda.device(words.device) if words.is_cuda else contextlib.nullcontext()
    with on_device:
        _row_digests[(-(-rows // shared),)](
            words,
            *tables,
            out,
            words.numel(),
            ROW=ROW_WORDS,
            SHARED=shared,
            BLOCK=_BLOCK_WORDS // shared,
            LOW_35=LOW_35,
            LOW_31=LOW_31,
            FMIX_1=FMIX_1,
            FMIX_2=FMIX_2,
            num_warps=8,
        )
    return out


def _row_digests_kernel(
    words: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    out: tl.tensor,
    num_words: tl.tensor,
    ROW: tl.constexpr,  # noqa: N803 -- Triton's custom for constants
    SHARED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LOW_35: tl.constexpr,  # noqa: N803
    LOW_31: tl.constexpr,  # noqa: N803
    FMIX_1: tl.constexpr,  # noqa: N803
    FMIX_2: tl.constexpr,  # noqa: N803
) -> None:
    rows = tl.program_id(0).to(tl.int64) * SHARED + tl.arange(0, SHARED)
    total = tl.zeros((SHARED, BLOCK), dtype=tl.int64)
    for start in range(0, ROW, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        place = rows[:, None] * ROW + columns[None, :]
        w = tl.load(words + place, mask=place < num_words, other=0)  # a zero word adds nothing
        p = w * tl.load(a + columns)[None, :] + (w >> 32) * tl.load(b + columns)[None, :]
        q = p ^ ((p >> 29) & LOW_35)
        total += q * tl.load(c + columns)[None, :]
    d = tl.sum(total, axis=1)
    d = (d ^ ((d >> 33) & LOW_31)) * FMIX_1
    d = (d ^ ((d >> 33) & LOW_31)) * FMIX_2
    d = d ^ ((d >> 33) & LOW_31)
    tl.store(out + rows, d, mask=rows * ROW < num_words)


_row_digests = triton.jit(_row_digests_kernel)
