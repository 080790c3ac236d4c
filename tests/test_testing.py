"""`run_ranks`: real ranks, and no way to hang a test."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from scout_core.testing import RankFailed, run_ranks

IN_TIME_S = 25.0
"""Far below what the bodies sleep, far above what a loaded machine needs."""


@pytest.fixture(autouse=True, scope="module")
def _warm_server() -> None:
    run_ranks(1, rank_of)  # starts the fork server outside the deadlines below


def rank_of(rank: int) -> int:
    return rank


def gathered(rank: int, offset: int) -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([rank + offset]))
    return [int(part) for part in parts]


def stuck_in_a_named_function(rank: int, late: int) -> None:
    if rank == late:
        time.sleep(100)


def stuck_before_a_barrier(rank: int) -> None:
    if rank == 0:
        time.sleep(100)
    dist.barrier()


def process_of(rank: int) -> int:
    return os.getpid()


def dead_at_once(rank: int, dead: int) -> str:
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def raising(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError("the loss is odd")
    dist.barrier()


def stopped(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def not_picklable(rank: int) -> object:
    return lambda: rank


def environment(rank: int) -> tuple[str, ...]:
    assert not dist.is_initialized()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return tuple(os.environ[name] for name in names)


def own_group(rank: int) -> int:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order_and_ranks_can_talk(world_size: int) -> None:
    expected = [rank + 10 for rank in range(world_size)]
    assert run_ranks(world_size, gathered, 10) == [expected] * world_size


def test_a_stuck_rank_is_named_in_time_with_its_stack() -> None:
    start, late = time.monotonic(), random.randrange(3)
    with pytest.raises(RankFailed, match=rf"^rank {late}: no result in time") as caught:
        run_ranks(3, stuck_in_a_named_function, late, timeout_s=3, init_group=False)
    assert time.monotonic() - start < IN_TIME_S
    assert "stuck_in_a_named_function" in str(caught.value)


def test_ranks_that_wait_for_a_stuck_one_are_late_too() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, stuck_before_a_barrier, timeout_s=2)
    assert [str(caught.value).count(f"rank {rank}: no result") for rank in range(2)] == [1, 1]


def test_a_rank_that_was_stopped_is_named_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"^rank 0: no result in time"):
        run_ranks(2, stopped, timeout_s=2, init_group=False)
    assert time.monotonic() - start < IN_TIME_S


def test_a_dead_rank_is_named_without_waiting() -> None:
    start, dead = time.monotonic(), random.randrange(3)
    with pytest.raises(RankFailed, match=f"rank {dead}: died without a word"):
        run_ranks(3, dead_at_once, dead, timeout_s=100)
    assert time.monotonic() - start < IN_TIME_S


def test_a_rank_that_may_die_leaves_no_result() -> None:
    assert run_ranks(3, dead_at_once, 1, allow_dead=[1]) == ["alive", None, "alive"]


def test_an_exception_is_reported_with_its_rank_without_waiting() -> None:
    start, bad = time.monotonic(), random.randrange(2)
    with pytest.raises(RankFailed, match=rf"^rank {bad}: Traceback(.|\n)*the loss is odd"):
        run_ranks(2, raising, bad, timeout_s=100)
    assert time.monotonic() - start < IN_TIME_S


def test_a_result_that_cannot_travel_is_reported_with_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"^rank 0: Traceback"):
        run_ranks(1, not_picklable)


def test_without_a_group_the_ranks_have_what_torchrun_would_set() -> None:
    results = run_ranks(2, environment, init_group=False)
    assert results == [(str(rank), str(rank), "2", "2", "127.0.0.1") for rank in range(2)]
    assert run_ranks(2, own_group, init_group=False) == [2, 2]


def test_no_process_is_left_behind() -> None:
    processes = run_ranks(3, process_of, init_group=False)
    assert len(set(processes)) == 3
    assert not [process for process in processes if pathlib.Path(f"/proc/{process}").exists()]
