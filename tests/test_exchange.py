"""Groups of SCOUT's own: members meet whatever other groups they are in."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from scout_core.evidence.exchange import GroupExchange
from scout_core.testing import run_ranks

RANKS = 4


def meet_after_other_groups(rank: int, more: list[int]) -> list[list[bytes]]:
    for _ in range(more[rank]):  # as the first and the last pipeline stage have
        dist.new_group([rank], use_local_synchronization=True)
    told = []
    for _ in range(2):
        exchange = GroupExchange(torch.device("cpu"), timeout_s=20.0)
        half = (0, 2) if rank in (0, 2) else (1, 3)
        exchange.join([half])
        told.append(exchange.all_gather(f"{rank}".encode(), half))
        exchange.close()
    return told


def test_members_meet_though_they_are_in_different_numbers_of_other_groups() -> None:
    more = random.sample(range(RANKS), RANKS)
    print(f"groups more: {more}")
    told = run_ranks(RANKS, meet_after_other_groups, more)
    assert told == [[[b"0", b"2"]] * 2, [[b"1", b"3"]] * 2] * 2


def meet_though_bound_to_a_device(rank: int) -> tuple[list[bytes], bool]:
    def split(group: dist.ProcessGroup) -> None:
        raise AssertionError("all ranks of the job would have to come")

    c10d._get_split_source = split  # what torch asks when the job is bound to a device
    world = c10d._get_default_group()
    bound = torch.device("cuda", 0)
    world.bound_device_id = bound
    exchange = GroupExchange(torch.device("cpu"), timeout_s=20.0)
    told = exchange.all_gather(f"{rank}".encode(), (0, 1))
    exchange.close()
    return told, world.bound_device_id == bound


def test_groups_are_not_split_off_the_training_communicator() -> None:
    assert run_ranks(2, meet_though_bound_to_a_device) == [([b"0", b"1"], True)] * 2
