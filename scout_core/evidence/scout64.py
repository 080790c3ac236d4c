"""SCOUT64: a deterministic, position-sensitive 64-bit hash that any accelerator computes in place.

Nothing but 64-bit integer multiply, add, shift and xor, so every device gives the same bits and the
order of summation does not matter. Arithmetic is modulo 2^64; `fmix` is MurmurHash3's finaliser.

    w_i   i-th little-endian 64-bit word of the raw bytes, the last one filled up with zeros
    p     w * A[c] + (w >> 32) * B[c]        c = i mod 16384, arithmetic shift
    q     p xor (p >>> 29)                   logical shift
    D_r   fmix(sum over the row of q * C[c]) r = i div 16384

The row digests D_r are words again; this repeats until one is left. See Note [Why not a plain sum].
"""

# Note [Why not a plain sum]
# The obvious hash, sum of w * A[c] with odd A, keeps bit 63 of every word in bit 63: flipping the
# signs of two fp32 numbers in odd slots cancels, whatever the multipliers are. So the upper half of
# a word is fed into the low bits as well (B), a fold that is not linear modulo 2^64 follows (q),
# and a second multiplier (C) separates positions again. All multipliers are odd, so a change within
# one aligned 4-byte half of a word changes p, q and the row's sum for certain; only changes of
# several halves can cancel, with the chance of a random 64-bit collision. Zero words add nothing,
# which is why dtype and shape must enter the signature beside this hash.

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from scout_core.evidence.raw_bytes import pieces, readable

ROW_WORDS = 1 << 14
ROW_BYTES = 8 * ROW_WORDS
MASK_64 = (1 << 64) - 1
FMIX_1 = 0xFF51AFD7ED558CCD - (1 << 64)  # as int64, the only wide integer torch and Triton share
FMIX_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)
LOW_35 = (1 << 35) - 1
LOW_31 = (1 << 31) - 1

# Rows copied or hashed at once: small enough for a CPU's cache, large enough to fill a GPU.
_CHUNK_ROWS_CPU = 4
_CHUNK_ROWS_ACCELERATOR = 256

Tables = tuple[Tensor, Tensor, Tensor]


def digest(tensor: Tensor) -> Tensor:
    """Return the hash of the raw bytes as a 0-dim int64 on the tensor's device.

    Nothing is read back, so the caller decides when to wait. Scratch memory is bounded: a few
    chunks (32 MiB on accelerators, 512 KiB on CPU) and 8 bytes per 128 KiB of the tensor.

    Raises:
        ScoutError: the tensor has no raw bytes (see `readable`).
    """
    with torch.no_grad():
        plain = readable(tensor)
        tables = multipliers(plain.device)
        rows = [_row_digests(words, tables) for words in _word_blocks(plain)]
        if not rows:
            return torch.zeros((), dtype=torch.int64, device=plain.device)
        return fold(torch.cat(rows), tables)


def fold(digests: Tensor, tables: Tables) -> Tensor:
    """Treat row digests (n,), n >= 1, as words again until one is left; returns it, 0-dim."""
    while digests.numel() > 1:
        digests = _row_digests(digests, tables)
    return digests.reshape(())


def fmix(values: Tensor) -> Tensor:
    """Mix each int64 so that every bit depends on every bit; a bijection."""
    values = (values ^ ((values >> 33) & LOW_31)) * FMIX_1
    values = (values ^ ((values >> 33) & LOW_31)) * FMIX_2
    return values ^ ((values >> 33) & LOW_31)


def row_terms(words: Tensor, tables: Tables) -> Tensor:
    """Return q * C[c] for words (rows, columns), columns <= 16384; a row's digest sums them."""
    a, b, c = (table[: words.shape[1]] for table in tables)
    p = words * a
    p += (words >> 32) * b
    p ^= (p >> 29) & LOW_35
    p *= c
    return p


@functools.cache
def multipliers(device: torch.device) -> Tables:
    """Return A, B and C, each (16384,) int64: a counter through `fmix`, made 1 modulo 4."""
    count = torch.arange(1, 3 * ROW_WORDS + 1, dtype=torch.int64, device=device)
    golden = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: 2^64 / golden ratio
    drawn = (fmix(count * golden) & ~3) | 1
    if device.type != "cpu":
        drawn[0].item()  # they are kept for good, and other streams must not read them unfinished
    a, b, c = drawn.view(3, ROW_WORDS)
    return a, b, c


def row_digests_eager(words: Tensor, tables: Tables) -> Tensor:
    """Return the digest of each row of 16384 words, in torch operations.

    Args:
        words: (n,) int64, n >= 1; the last row may be shorter.
    """
    chunks = torch.split(words, _chunk_rows(words.device) * ROW_WORDS)
    return fmix(torch.cat([_row_sums(chunk, tables) for chunk in chunks]))


def _row_sums(words: Tensor, tables: Tables) -> Tensor:
    whole = words.numel() // ROW_WORDS * ROW_WORDS
    parts = (words[:whole].view(-1, ROW_WORDS), words[whole:].view(1, -1))
    return torch.cat([row_terms(part, tables).sum(1) for part in parts if part.numel()])


def _row_digests(words: Tensor, tables: Tables) -> Tensor:
    if words.is_cuda and _has_triton():
        from scout_core.evidence.signature_triton import row_digests_fused

        return row_digests_fused(words, tables)
    return row_digests_eager(words, tables)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _chunk_rows(device: torch.device) -> int:
    return _CHUNK_ROWS_CPU if device.type == "cpu" else _CHUNK_ROWS_ACCELERATOR


def _word_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the words as 1-D int64 tensors; every block but the last is a whole number of rows.

    Aligned contiguous memory is one block without a copy, but for a last row with odd bytes.
    """
    limit = _chunk_rows(tensor.device) * ROW_BYTES
    parts = pieces(tensor, limit)
    left = tensor.nbytes
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.is_contiguous() and not lazy and tensor.data_ptr() % 8 == 0:
        flat = next(parts)
        whole = left // ROW_BYTES * ROW_BYTES if left % 8 else left
        if whole:
            yield flat[:whole].view(torch.int64)
        parts, left = iter([flat[whole:]]), left - whole
    if left:
        yield from _staged(parts, min(limit, -(-left // 8) * 8))


def _staged(parts: Iterator[Tensor], size_bytes: int) -> Iterator[Tensor]:
    """Copy 1-D uint8 parts through one block; the last one is filled up with zeros to a word.

    A block is overwritten after the consumer asked for the next one: on an accelerator its reads
    are then queued before the copy, on the same stream.
    """
    block, used = torch.empty(0), 0
    for part in parts:
        if not block.numel():
            block = torch.empty(size_bytes, dtype=torch.uint8, device=part.device)
        rest = part
        while rest.numel():
            taken = min(rest.numel(), size_bytes - used)
            block[used : used + taken] = rest[:taken]
            used, rest = used + taken, rest[taken:]
            if used == size_bytes:
                yield block.view(torch.int64)
                used = 0
    if used:
        end = -(-used // 8) * 8
        block[used:end] = 0
        yield block[:end].view(torch.int64)
