"""Component-wise dominance between count vectors, for 100,000 vectors at once.

`a` dominates `b` when `a >= b` in every component. Comparing all pairs costs N * N * D operations;
here one bit stands for one vector, so that a machine word answers 64 comparisons (Note [Bit sets]).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Indices = NDArray[np.int64]

_BLOCK_VECTORS = 256  # vectors looked up together: their bit rows stay in the cache
_TABLE_BYTES = 1 << 27  # limit for all bit sets together
_MOST_LEVELS = 256
_WORD_BITS = 64
_CHUNK_WORDS = 16  # words whose candidates are compared exactly at a time

# Note [Bit sets]
# For a component and a level L, the bit set holds one bit per vector: is its component >= L? A
# vector v takes, per component, the set of the greatest level <= v's component, and ANDs them. What
# is left contains every vector that dominates v, and a few more where two values share a level; so
# each candidate is compared exactly before it counts.
#
# Vectors are sorted descending, by first component, then second, and so on. Whoever dominates v
# stands before v (vectors are distinct), and the FIRST vector that dominates v is dominated by
# none: its dominator would stand before it and dominate v too. So one pass finds the maximal
# vectors and one maximal dominator of each other vector.


class Cover(NamedTuple):
    """The maximal elements of a set of vectors, and who lies below which."""

    maximal: Indices
    """(M,) positions of the representatives, ascending."""
    representative: Indices
    """(N,) for each vector the position of a representative that dominates it."""


def minimum_cover(counts: Counts) -> Cover:
    """Return the smallest set of vectors that dominates all vectors.

    Args:
        counts: (N, D) integers, N >= 1, D >= 1. Of equal vectors only the LAST can be
            representative, so a caller that sorts its shapes decides ties for the largest.

    The set is the set of distinct maximal elements, and it is minimum. It covers: from any vector,
    stepping to a strictly greater one ends, as there are finitely many, at a maximal one. It is
    minimum: a maximal vector is dominated by vectors equal to it and no others, so every cover
    contains one of each class of equal maximal vectors; this one contains exactly one of each.
    """
    classes, class_of = np.unique(counts, axis=0, return_inverse=True)
    class_of = class_of.reshape(-1)
    last = np.zeros(len(classes), dtype=np.int64)
    np.maximum.at(last, class_of, np.arange(len(counts)))
    first = _first_dominator(np.ascontiguousarray(classes[::-1]))
    above = np.where(first < 0, np.arange(len(classes)), first)
    above_class = len(classes) - 1 - above[::-1]
    representative = last[above_class[class_of]]
    return Cover(np.unique(representative), representative)


def _first_dominator(vectors: Counts) -> Indices:
    """Return for each vector the position of the first one that dominates it, or -1.

    Args:
        vectors: (N, D) distinct, in descending lexicographic order.
    """
    found = np.empty(len(vectors), dtype=np.int64)
    levels, tables = _bit_sets(vectors)
    for start in range(0, len(vectors), _BLOCK_VECTORS):
        block = vectors[start : start + _BLOCK_VECTORS]
        words = (start + len(block) - 1) // _WORD_BITS + 1  # a dominator stands before its vector
        left = np.full((len(block), words), ~np.uint64(0))
        for d, table in enumerate(tables):
            level = np.searchsorted(levels[d], block[:, d], side="right") - 1
            left &= table[level, :words]
        for i, row in enumerate(left, start):
            found[i] = _first_confirmed(row, vectors, i)
    return found


def _bit_sets(vectors: Counts) -> tuple[list[Counts], list[NDArray[np.uint64]]]:
    size, components = vectors.shape
    words = -(-size // _WORD_BITS)
    affordable = _TABLE_BYTES // (8 * words * components)
    levels, tables = [], []
    for d in range(components):
        values = np.unique(vectors[:, d])
        kept = min(len(values), max(2, min(affordable, _MOST_LEVELS)))
        values = values[np.linspace(0, len(values) - 1, kept).astype(np.int64)]
        bits = np.zeros((len(values), words * _WORD_BITS), dtype=bool)
        bits[:, :size] = vectors[None, :, d] >= values[:, None]
        levels.append(values)
        tables.append(np.packbits(bits, axis=1, bitorder="little").view(np.uint64))
    return levels, tables


def _first_confirmed(row: NDArray[np.uint64], vectors: Counts, own: int) -> int:
    """Return the first vector before `own` whose bit is set and which really dominates it."""
    occupied = np.flatnonzero(row)
    for start in range(0, len(occupied), _CHUNK_WORDS):
        words = occupied[start : start + _CHUNK_WORDS]
        bits = np.unpackbits(row[words].view(np.uint8), bitorder="little")
        word, bit = np.nonzero(bits.reshape(-1, _WORD_BITS))
        candidates = words[word] * _WORD_BITS + bit
        candidates = candidates[candidates < own]
        above = (vectors[candidates] >= vectors[own]).all(axis=1)
        if above.any():
            return int(candidates[np.argmax(above)])
    return -1
