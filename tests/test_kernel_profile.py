"""Launches seen from outside become observations only when they say what was executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.catalog import Observation
from scout_core.decision.schedule import GroupedGemm
from scout_core.evidence.environment import OWN_KERNEL, TORCH_KERNEL, kernel_version, machine
from scout_core.evidence.kernel_profile import (
    KernelLaunch,
    ScheduleProfiler,
    TorchProfiler,
    Unseen,
    alignment_class,
    launches_in,
    observation_of,
)
from scout_core.lab.expert_workload import torch_experts

SMS = 108


def kernel(name: str, grid: list[int], start: float, block: int = 128) -> dict[str, Any]:
    """A kernel event as torch.profiler's Chrome trace has it."""
    arguments = {"grid": grid, "block": [block, 1, 1], "stream": 7}
    return {"cat": "kernel", "name": name, "ts": start, "dur": 3.0, "args": arguments}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    others = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0}, {"name": "process_name", "ph": "M"}]
    return {"traceEvents": [*others, *events]}


def test_launches_are_read_in_the_order_of_their_start() -> None:
    found = launches_in(trace(kernel("b", [3, 2, 1], 9.0), kernel("a", [1, 1, 1], 5.0, 64)))
    assert found == [
        KernelLaunch("a", (64, 1, 1), (1, 1, 1)),
        KernelLaunch("b", (128, 1, 1), (3, 2, 1)),
    ]
    assert [launch.programs for launch in found] == [1, 6]


def test_the_paths_of_an_observation_are_kernels_counted_in_programs() -> None:
    seen = observation_of(
        96,
        trace(
            kernel("gemm", [3, 2, 1], 1.0), kernel("gemm", [5, 1, 1], 2.0), kernel("add", [9], 3.0)
        ),
        SMS,
    )
    assert isinstance(seen, Observation)
    assert seen.path_counts == {"gemm<128x1x1>": 11, "add<128x1x1>": 9}
    assert str(seen.fingerprint).endswith("rows aligned to 32")


def test_another_kernel_or_block_or_order_is_another_fingerprint() -> None:
    runs = [
        [kernel("a", [1], 1.0), kernel("b", [1], 2.0)],
        [kernel("b", [1], 1.0), kernel("a", [1], 2.0)],
        [kernel("a", [1], 1.0, 256), kernel("b", [1], 2.0)],
        [kernel("c", [1], 1.0), kernel("b", [1], 2.0)],
    ]
    seen = [observation_of(5, trace(*events), SMS) for events in runs]
    assert all(isinstance(each, Observation) for each in seen)
    assert len({each.fingerprint for each in seen if isinstance(each, Observation)}) == 4


@pytest.mark.parametrize("programs", [SMS, 2 * SMS])
def test_a_grid_that_may_be_persistent_shows_nothing(programs: int) -> None:
    seen = observation_of(5, trace(kernel("gemm", [programs, 1, 1], 1.0)), SMS)
    assert isinstance(seen, Unseen)
    assert "may be persistent" in seen.reason


@given(
    st.integers(0, 5000), st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256])
)
def test_equal_alignment_means_equal_tails_for_every_tile(a: int, b: int, tile: int) -> None:
    if alignment_class(a) == alignment_class(b):
        assert (a % tile > 0) == (b % tile > 0)


def test_a_cpu_shows_no_launch_geometry_and_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    workload = torch_experts(GroupedGemm(4, 4, experts=2), torch.float32, torch.device("cpu"))
    seen = TorchProfiler(workload, num_sms=SMS).observe((3, 0))
    assert isinstance(seen, Unseen)
    assert "no launch geometry" in seen.reason


def test_the_schedule_profiler_computes_what_the_model_says() -> None:
    gemm = GroupedGemm(8, 8, experts=2)
    assert ScheduleProfiler(gemm).observe((5, 0)) == gemm.observation((5, 0))
    fine = ScheduleProfiler(gemm, per_program=True).observe((5, 0))
    assert fine == gemm.observation((5, 0), per_program=True)


def test_the_torch_workload_is_forward_and_backward_of_each_expert() -> None:
    gemm = GroupedGemm(4, 3, experts=2)
    gradients = torch_experts(gemm, torch.float32, torch.device("cpu"))((5, 0))()
    assert isinstance(gradients, tuple)
    assert [tuple(g.shape) for g in gradients] == [(5, 4), (0, 4), (4, 3), (4, 3)]


def test_the_machine_has_no_empty_field() -> None:
    found = machine()
    assert set(found) == {"gpu", "num_sms", "driver", "cuda", "torch", "nccl"}
    assert all(found.values())
    assert type(found["torch"]) is str


def test_kernel_versions_are_known_for_the_kernels_of_scout() -> None:
    assert str(kernel_version(TORCH_KERNEL)).endswith(torch.__version__)
    assert str(kernel_version(OWN_KERNEL)).startswith("scout ")
    assert kernel_version("someone else's") is None
