"""SCOUT64 against a reference in plain Python, and what it must never miss."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scout_core.evidence import scout64

MASK = (1 << 64) - 1
ROW_WORDS = 16384
ROW_BYTES = 8 * ROW_WORDS
CPU = torch.device("cpu")
GOLDEN = 0x9E3779B97F4A7C15


def fmix(value: int) -> int:
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD & MASK
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53 & MASK
    return value ^ (value >> 33)


MULTIPLIERS = [fmix(i * GOLDEN & MASK) & ~3 | 1 for i in range(1, 3 * ROW_WORDS + 1)]
A, B, C = (MULTIPLIERS[i * ROW_WORDS : (i + 1) * ROW_WORDS] for i in range(3))


def reference_row(words: list[int]) -> int:
    total = 0
    for w, a, b, c in zip(words, A, B, C, strict=False):
        high = (w - (1 << 64) if w >> 63 else w) >> 32
        p = (w * a + high * b) & MASK
        total += (p ^ (p >> 29)) * c
    return fmix(total & MASK)


def reference(raw: bytes) -> int:
    """The module's docstring, read literally."""
    padded = raw + bytes(-len(raw) % 8)
    words = list(struct.unpack(f"<{len(padded) // 8}Q", padded))
    if not words:
        return 0
    while True:
        words = [reference_row(words[i : i + ROW_WORDS]) for i in range(0, len(words), ROW_WORDS)]
        if len(words) == 1:
            return words[0]


def digest(tensor: Tensor) -> int:
    return int(scout64.digest(tensor)) & MASK


def random_bytes(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


EDGES = [0, 1, 3, 7, 8, 9, 1000, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 5, 3 * ROW_BYTES + 13]


@pytest.mark.parametrize("size", [*EDGES, 5 * ROW_BYTES + 8])
def test_it_is_the_formula(size: int) -> None:
    raw = random_bytes(size)
    assert digest(raw) == reference(raw.numpy().tobytes())


@given(st.binary(max_size=300), st.integers(0, 9))
def test_memory_at_any_alignment_gives_the_formula(raw: bytes, offset: int) -> None:
    memory = torch.tensor([0] * offset + list(raw), dtype=torch.uint8)
    assert digest(memory[offset:]) == reference(raw)


@pytest.mark.parametrize("size", [ROW_BYTES + 5, 9 * ROW_BYTES, 9 * ROW_BYTES + 3])
@pytest.mark.parametrize("offset", [1, 4])
def test_large_misaligned_memory_is_staged_into_the_same_rows(size: int, offset: int) -> None:
    memory = random_bytes(size + offset)
    assert digest(memory[offset:]) == digest(memory[offset:].clone())


def test_more_row_digests_than_a_row_holds_fold_twice() -> None:
    digests = torch.arange(ROW_WORDS + 5)  # of a tensor of over 2 GiB
    rows = list(range(ROW_WORDS + 5))
    expected = reference_row([reference_row(rows[:ROW_WORDS]), reference_row(rows[ROW_WORDS:])])
    assert int(scout64.fold(digests, scout64.multipliers(CPU))) & MASK == expected


def test_the_algorithm_never_changes_silently() -> None:
    assert digest(torch.arange(100_000)) == 11215179661805503424


def test_the_multipliers_are_1_mod_4_and_differ_in_their_low_half() -> None:
    for table in scout64.multipliers(CPU):
        assert bool((table & 3 == 1).all())
        assert torch.unique(table & 0xFFFFFFFF).numel() == ROW_WORDS


def test_every_bit_flip_of_4_mib_changes_the_result() -> None:
    """All 33,554,432 of them, through the sums that a flip changes; some checked end to end."""
    floats = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    floats[::7] = 0.0  # so that flips turn 0.0 into -0.0 and into denormals
    words = floats.view(torch.int64)
    flips = FlippedBits(words)
    for bit in range(64):
        assert not bool((flips.results(bit) == flips.unchanged).any()), bit
    for position, bit in [(0, 0), (5, 63), (16384, 31), (524287, 62), (262144, 52)]:
        damaged = words.clone()
        damaged[position] ^= 1 << bit if bit < 63 else -(1 << 63)
        assert int(scout64.digest(damaged)) == int(flips.results(bit).flatten()[position])


class FlippedBits:
    """The digests that follow from flipping one bit of one word, for all words at once."""

    def __init__(self, words: Tensor) -> None:
        self.tables = scout64.multipliers(CPU)
        self.words = words.view(-1, ROW_WORDS)
        self.terms = scout64.row_terms(self.words, self.tables)
        self.sums = self.terms.sum(1)
        rows = scout64.fmix(self.sums).view(1, -1)
        self.upper_terms = scout64.row_terms(rows, self.tables)
        self.upper_sum = self.upper_terms.sum()
        self.unchanged = int(scout64.digest(words))

    def results(self, bit: int) -> Tensor:
        """(rows, 16384): the digest if this bit of the word there were flipped."""
        flipped = self.words ^ (1 << bit if bit < 63 else -(1 << 63))
        change = scout64.row_terms(flipped, self.tables) - self.terms
        rows = scout64.fmix(self.sums[:, None] + change)
        upper_terms = scout64.row_terms(rows.T, self.tables)  # column = number of the row
        return scout64.fmix(self.upper_sum + upper_terms - self.upper_terms).T


SIGNS = 1.0 - 2.0 * ((torch.arange(1 << 16)[:, None] >> torch.arange(16)) & 1)
"""(65536, 16) every pattern of 16 signs."""
ODD_SLOTS = torch.stack([torch.zeros_like(SIGNS), SIGNS], dim=2).reshape(1 << 16, 32)

FAMILIES = {
    "fp32 signs": SIGNS.float().view(torch.int64),
    "fp32 signs in odd slots": ODD_SLOTS.float().view(torch.int64),
    "fp64 signs": SIGNS.double().view(torch.int64),
    "bf16 signs": SIGNS.bfloat16().view(torch.int64),
    "signs of infinity": (SIGNS * float("inf")).float().view(torch.int64),
    "0 and -1": (SIGNS < 0).long().neg(),
    "0 and the smallest integer": (SIGNS < 0).long() << 63,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_of_65536_sign_patterns_collide(family: str) -> None:
    sums = scout64.row_terms(FAMILIES[family], scout64.multipliers(CPU)).sum(1)
    assert torch.unique(scout64.fmix(sums)).numel() == 1 << 16


def test_the_obvious_odd_multiplier_sum_does_collide_on_them() -> None:
    a, _, _ = scout64.multipliers(CPU)
    sums = (FAMILIES["fp32 signs in odd slots"] * a[:16]).sum(1)
    assert torch.unique(sums).numel() < 10


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_on_average_half_of_the_bits_change(seed: int) -> None:
    raw = random_bytes(64, seed)
    changed = [digest(raw ^ torch.eye(64, dtype=torch.uint8)[i]) ^ digest(raw) for i in range(64)]
    assert 28 < sum(value.bit_count() for value in changed) / 64 < 36


class Recorder(TorchDispatchMode):
    """Notes every operation, and the bytes of each storage that is not the input's."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest_bytes = 0
        self._known = tensor.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        for result in out if isinstance(out, list | tuple) else [out]:
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self._known:
                self.largest_bytes = max(self.largest_bytes, result.untyped_storage().nbytes())
        return out


def test_nothing_is_read_back_from_the_device() -> None:
    tensor = torch.randn(3, 5, 70_000).transpose(0, 1)
    scout64.multipliers(CPU)
    with Recorder(tensor) as seen:
        scout64.digest(tensor)
    assert not {name for name in seen.names if "_local_scalar_dense" in name or "_to_copy" in name}


LAYOUTS = {
    "contiguous": lambda n: torch.ones(n, dtype=torch.uint8),
    "misaligned": lambda n: torch.ones(n + 1, dtype=torch.uint8)[1:],
    "transposed": lambda n: torch.ones(n // 64, 64, dtype=torch.uint8).t(),
    "wide rows": lambda n: torch.ones(n // 2, 2, dtype=torch.uint8).t(),
    "expanded": lambda n: torch.ones(1, dtype=torch.uint8).expand(n),
    "conjugated": lambda n: torch.ones(n // 8, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scratch_memory_does_not_grow_with_the_tensor(layout: str) -> None:
    scout64.multipliers(CPU)
    for size in (1 << 22, 1 << 25):
        tensor = LAYOUTS[layout](size)
        with Recorder(tensor) as seen:
            scout64.digest(tensor)
        assert 0 < seen.largest_bytes <= 4 * ROW_BYTES


FUSED_EQUALS_EAGER = """
import torch
from scout_core.evidence import scout64
from scout_core.evidence.signature_triton import row_digests_fused
tables = scout64.multipliers(torch.device("cpu"))
for n in (1, 5, 16384, 16385, 3 * 16384 + 17, 5 * 16384):
    words = torch.randint(-(2**63), 2**63 - 1, (n,))
    for rows_per_program in (1, 4, None):
        fused = row_digests_fused(words, tables, rows_per_program)
        assert torch.equal(fused, scout64.row_digests_eager(words, tables)), (n, rows_per_program)
"""

COMPILES_FOR_A_GPU = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from scout_core.evidence import scout64, signature_triton
constants = {"ROW": 16384, "SHARED": 4, "BLOCK": 1024}
constants |= {name: getattr(scout64, name) for name in ("LOW_35", "LOW_31", "FMIX_1", "FMIX_2")}
types = {name: "*i64" for name in ("words", "a", "b", "c", "out")} | {"num_words": "i64"}
types |= {name: "constexpr" for name in constants}
source = ASTSource(signature_triton._row_digests, types, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
assert "mul" in compiled.asm["ptx"]
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("script", "interpreted"), [(FUSED_EQUALS_EAGER, "1"), (COMPILES_FOR_A_GPU, "0")]
)
def test_the_fused_kernel_compiles_and_gives_the_same_bits(script: str, interpreted: str) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=50, text=True
    )
    assert done.returncode == 0, done.stderr
