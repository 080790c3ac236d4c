"""A run with SCOUT on has bitwise the same losses, parameters and buffers as one with it off."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from integration_tests.jobs import JobOptions, JobResult, train
from scout_core.testing import run_ranks

SCOUT = {
    "interval_steps": 1,
    "on_error": "raise",
    "timing_repeats": 2,
    "exchange_timeout_s": 50,
    "communication": {"probe_interval_steps": 2},
    "workload": {"interval_steps": 3},
}

CASES = {
    "ddp": JobOptions("ddp", 4, dropout=0.1),
    "fsdp2": JobOptions("fsdp2", 4, dropout=0.1, clip=0.5),
    "hsdp": JobOptions("hsdp", 4, dropout=0.1, accumulate=2),
    "hsdp_tp": JobOptions("hsdp_tp", 8, dropout=0.1),
    "three ranks": JobOptions("ddp", 3, optimizer="sgd"),
    "accumulation": JobOptions("ddp", 3, accumulate=3, clip=0.1),
    "autocast": JobOptions("ddp", 3, autocast=True, dropout=0.1),
    "fsdp2 autocast": JobOptions("fsdp2", 3, autocast=True),
    "activation checkpointing": JobOptions("ddp", 3, checkpointed=True, dropout=0.1),
    "fsdp2 activation checkpointing": JobOptions("fsdp2", 3, checkpointed=True, dropout=0.1),
    "batch norm buffers": JobOptions("ddp", 3, batch_norm=True),
    "tied weights": JobOptions("ddp", 3, tied=True),
    "fsdp2 tied weights": JobOptions("fsdp2", 3, tied=True, optimizer="adam"),
    "foreach optimizer": JobOptions("ddp", 3, optimizer="adamw_foreach"),
    "fused optimizer": JobOptions("fsdp2", 3, optimizer="adamw_fused"),
    "block.compile aot_eager": JobOptions("ddp", 3, compiled="block:aot_eager", dropout=0.1),
    "torch.compile(block) aot_eager": JobOptions("fsdp2", 3, compiled="wrap:aot_eager"),
    "model.compile aot_eager": JobOptions("ddp", 3, compiled="model:aot_eager"),
    "block.compile inductor": JobOptions("ddp", 3, compiled="block:inductor"),
}


def off_and_on(
    rank: int, options: JobOptions, scout: dict[str, Any], run_dir: str
) -> tuple[JobResult, JobResult]:
    return train(rank, options, None), train(rank, options, scout, run_dir)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CASES)
def test_scout_changes_no_bit_of_training(name: str, tmp_path: pathlib.Path) -> None:
    options = CASES[name]
    results = run_ranks(options.ranks, off_and_on, options, SCOUT, str(tmp_path), timeout_s=140)
    for off, on in results:
        assert on.losses == off.losses
        assert on.parameters == off.parameters
        assert on.buffers == off.buffers
        assert on.incidents == []
        assert on.checks == options.steps
        assert (on.not_covered != ()) is options.compiled.startswith("model:")
