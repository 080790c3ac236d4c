"""The instrumented Triton kernel computes the projection and takes the branches of the model.

The interpreter is slow, so this runs a few shapes; `python -m benchmarks.catalog` runs 240.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from scout_core.decision.catalog import build_catalog
from scout_core.decision.schedule import GroupedGemm, Tile, uniform
from scout_core.errors import ScoutError
from scout_core.lab.grouped_gemm import (
    Operands,
    TritonProfiler,
    project,
    random_operands,
    require_triton,
)

INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")


def random_case(seed: int) -> tuple[GroupedGemm, tuple[int, ...]]:
    draw = np.random.default_rng(seed)
    experts = int(draw.integers(1, 5))

    def one_of(*values: int) -> int:
        return int(draw.choice(values))

    gemm = GroupedGemm(
        in_features=one_of(4, 6, 8, 12),
        out_features=one_of(4, 6, 8, 12),
        experts=experts,
        num_sms=one_of(2, 3, 5, 8),
        tile=Tile(one_of(4, 8), one_of(4, 8, 16), one_of(4, 8)),
        weight_tile=Tile(one_of(4, 8), one_of(4, 8, 16), one_of(2, 4)),
        max_slices=one_of(1, 2, 4),
        even_slices=bool(draw.integers(2)),
    )
    return gemm, tuple(draw.integers(0, 14, experts).tolist())


def by_torch(shape: tuple[int, ...], operands: Operands) -> list[torch.Tensor]:
    """Output, input gradient and weight gradient, one expert at a time."""
    xs, dys = operands.x.split(shape), operands.output_gradient.split(shape)
    parts = list(zip(xs, operands.weight, dys, strict=True))
    return [
        torch.cat([x @ w for x, w, _ in parts]),
        torch.cat([dy @ w.T for _, w, dy in parts]),
        torch.stack([x.T @ dy for x, _, dy in parts]),
    ]


@needs_triton
@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_takes_each_branch_as_often_as_the_model_says(seed: int) -> None:
    gemm, shape = random_case(seed)
    counters = project(gemm, shape, random_operands(gemm, shape, seed)).counters
    for launch in gemm.launches(shape):
        assert counters[launch.phase].tolist() == launch.program_counts().tolist()


@needs_triton
@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_computes_the_projection_and_its_gradients(seed: int) -> None:
    gemm, shape = random_case(100 + seed)
    operands = random_operands(gemm, shape, seed)
    found = project(gemm, shape, operands)
    for value, expected in zip(found[:3], by_torch(shape, operands), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@needs_triton
def test_a_measured_catalogue_is_the_computed_one() -> None:
    gemm = GroupedGemm(4, 4, 2, num_sms=3, tile=Tile(4, 4, 4), weight_tile=Tile(4, 4, 2))
    shapes = [uniform(2, n) for n in (1, 3, 4, 5, 8)]
    measured = build_catalog(map(TritonProfiler(gemm).observe, shapes))
    computed = build_catalog(map(gemm.observation, shapes))
    assert measured.observations() == computed.observations()
    assert measured.representatives == computed.representatives


COMPILES_FOR_A_GPU = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from scout_core.lab.grouped_gemm_kernel import kernel
compiled = kernel(interpreted=False)
constants = {"TM": 32, "TN": 128, "TK": 64, "SLICES": 4, "EVEN": True}
pointers = {"a": "*fp32", "b": "*fp32", "out": "*fp32", "counters": "*i32", "table": "*i64"}
types = dict.fromkeys(compiled.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
source = ASTSource(compiled, types, constexprs=constants)
assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
"""


@needs_triton
def test_the_same_source_compiles_for_an_a100() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILES_FOR_A_GPU],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        timeout=50,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_without_triton_the_profiler_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ScoutError, match="install it, or use the schedule model"):
        TritonProfiler(GroupedGemm(4, 4))
    with pytest.raises(ScoutError, match="needs the package triton"):
        require_triton()


def test_operands_have_the_rows_of_all_experts() -> None:
    operands = random_operands(GroupedGemm(4, 6, experts=3), (2, 0, 5), seed=0)
    assert [tuple(t.shape) for t in operands] == [(7, 4), (3, 4, 6), (7, 6)]
