"""The c10d observer sees every operation of every caller, before it blocks, and changes nothing."""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from scout_core.errors import ScoutError
from scout_core.evidence import collectives
from scout_core.evidence.c10d_operators import operators
from scout_core.evidence.collectives import Operation, Pending
from scout_core.evidence.progress import Publisher
from scout_core.evidence.ring import RECEIVE, SEND, RingReader, RingState
from scout_core.testing import run_ranks

WIDTH = 16
early_all_reduce = dist.all_reduce  # a reference bound before anything is installed
Step = Callable[[], object]


class Log:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.entries: list[Operation] = []
        self.completions: list[Operation] = []
        self.reasons: list[str] = []

    def entered(self, operation: Operation) -> int:
        self.entries.append(operation)
        return len(self.entries)

    def completed(self, operation: Operation, note: int) -> None:
        assert self.entries[note - 1] is operation
        self.completions.append(operation)

    def certain(self, order: Pending) -> None:
        return None

    def disarmed(self, reason: str) -> None:
        self.reasons.append(reason)


def state_of(publisher: Publisher) -> RingState:
    return RingReader.open(f"/proc/{os.getpid()}/fd/{publisher.ring.descriptor}").state()


# Callers. Each takes (rank, world size) and returns what is to be observed.


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module) -> Step:
    return lambda: model(torch.randn(4, WIDTH)).sum().backward()


def direct(rank: int, size: int) -> Step:
    def step() -> None:
        x = torch.ones(8)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.barrier()
        dist.all_gather_into_tensor(torch.empty(8 * size), x)
        dist.all_gather([torch.empty(8) for _ in range(size)], x)
        dist.reduce_scatter_tensor(torch.empty(8 // size), x)
        dist.all_to_all_single(torch.empty(8), x)
        dist.reduce(x, 0)
        dist.gather(x, [torch.empty(8) for _ in range(size)] if rank == 0 else None)
        dist.scatter(x, [torch.empty(8) for _ in range(size)] if rank == 0 else None)
        dist.all_reduce(x, async_op=True).wait()
        early_all_reduce(x)

    return step


def objects(rank: int, size: int) -> Step:
    def step() -> None:
        dist.all_gather_object([None] * size, {"rank": rank})
        dist.broadcast_object_list([{"x": 1} if rank == 0 else None], 0)

    return step


def point_to_point(rank: int, size: int) -> Step:
    def step() -> None:
        x, y = torch.ones(8), torch.empty(8)
        if rank < 2:
            dist.send(x, 1) if rank == 0 else dist.recv(y, 0)
        peers = (rank + 1) % size, (rank - 1) % size
        both = [dist.P2POp(dist.isend, x, peers[0]), dist.P2POp(dist.irecv, y, peers[1])]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return step


def data_parallel(rank: int, size: int) -> Step:
    step = train(nn.parallel.DistributedDataParallel(tower(), bucket_cap_mb=0.001))
    step()
    return step


def fully_sharded(rank: int, size: int) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = tower()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    step = train(model)
    step()
    return step


def tensor_parallel(rank: int, size: int) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", (size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(tower(), mesh, plan))


def functional_eager(rank: int, size: int) -> Step:
    def step() -> torch.Tensor:
        x = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD) + 1
        x = functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1
        return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 1

    return step


def functional_compiled(rank: int, size: int) -> Step:
    step = torch.compile(functional_eager(rank, size), backend="aot_eager")
    step()
    return step


def pipeline_1f1b(rank: int, size: int) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda a, b: (a - b).square().mean())

    def step() -> None:
        if rank == 0:
            schedule.step(torch.randn(4, WIDTH))
        else:
            schedule.step(target=torch.randn(4, WIDTH), losses=[])

    step()
    return step


CALLERS = (
    direct,
    objects,
    point_to_point,
    data_parallel,
    fully_sharded,
    tensor_parallel,
    functional_eager,
    functional_compiled,
    pipeline_1f1b,
)
SPECS = operators()


def count_both(rank: int, names: list[str]) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Per caller: what the profiler saw, and what the observer saw, by common word."""
    warnings.simplefilter("ignore")
    callers: dict[str, Any] = {caller.__name__: caller for caller in CALLERS}
    found = {}
    for name in names:
        step = callers[name](rank, dist.get_world_size())
        log = Log()
        remove = collectives.observe(log)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        remove()
        seen = collections.Counter(operation.name for operation in log.entries)
        truth = collections.Counter(
            SPECS[event.name.removeprefix("c10d::")].word
            for event in profile.events()
            if event.name.startswith("c10d::")
        )
        found[name] = (dict(truth), dict(seen))
    return found


def test_every_operation_that_the_profiler_saw_of_any_caller_is_observed() -> None:
    names = [caller.__name__ for caller in CALLERS]
    for found in run_ranks(2, count_both, names, timeout_s=50):
        assert [name for name in names if not sum(found[name][0].values())] == []
        for name, (truth, seen) in found.items():
            assert seen == truth, name


def see_it_pending(rank: int) -> tuple[str, int, bool, str]:
    """Rank 1 enters only after rank 0 has been seen inside the operation."""
    publisher = Publisher(rank)
    remove = collectives.observe(publisher)
    store = dist.distributed_c10d._get_default_store()
    seen: list[Any] = []

    def watch() -> None:
        deadline = time.monotonic() + 10
        while not state_of(publisher).operations and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(state_of(publisher).operations[-1])
        store.set("go", "1")

    watcher = threading.Thread(target=watch)
    if rank == 0:
        watcher.start()
    else:
        store.get("go")
    dist.all_reduce(torch.ones(6, dtype=torch.float64), op=dist.ReduceOp.MAX)
    if rank == 0:
        watcher.join(10)
    collectives.refresh()
    last = state_of(publisher).operations[-1]
    remove()
    pending = (seen or [last])[0]
    return pending.operation, pending.numel, bool(seen) and not seen[0].done_ns, last.site


def test_an_operation_is_published_before_it_blocks_and_with_its_line() -> None:
    first, second = run_ranks(2, see_it_pending)
    assert first[:3] == ("all_reduce float64 max", 6, True)
    assert second[:2] == first[:2]
    assert __file__ in first[3]
    assert first[3].endswith(" see_it_pending")


def every_completion(rank: int) -> list[tuple[str, int, int | None, int]]:
    """Operation by operation: is it known to be complete once it has been waited for?"""
    warnings.simplefilter("ignore")
    publisher = Publisher(rank)
    remove = collectives.observe(publisher)
    x, size = torch.ones(8), dist.get_world_size()
    lists = [torch.empty(8) for _ in range(size)]
    calls: list[Callable[[], Any]] = [
        functools.partial(dist.all_reduce, x),
        functools.partial(dist.broadcast, x, 1),
        functools.partial(dist.reduce, x, 1),
        functools.partial(dist.all_gather, lists, x),
        functools.partial(dist.all_gather_into_tensor, torch.empty(8 * size), x),
        functools.partial(dist.reduce_scatter_tensor, torch.empty(8 // size), x),
        functools.partial(dist.all_to_all_single, torch.empty(8), x),
        dist.monitored_barrier,
        dist.barrier,
        functools.partial(dist.reduce_scatter_tensor, torch.empty(8 // size), x),
    ]
    found = []
    for call in calls:
        call()
        deadline = time.monotonic() + 5  # the backend's own record of a reduce-scatter comes late
        while time.monotonic() < deadline:
            collectives.refresh(thorough=True)
            state = state_of(publisher)
            if state.orders[0].completed == state.orders[0].entered:
                break
        last = state.operations[-1]
        found.append((last.operation, last.sequence, state.orders[0].completed, last.done_ns))
    remove()
    return found


def test_what_was_waited_for_is_known_to_be_complete() -> None:
    for rank, found in enumerate(run_ranks(2, every_completion)):
        for number, (operation, sequence, completed, done_ns) in enumerate(found, start=1):
            assert (sequence, completed) == (number, number), (rank, operation)
            assert done_ns > 0, (rank, operation)


def leave_one_out(rank: int) -> tuple[int, int | None, int, int | None]:
    """Rank 0 enters an all-reduce and a reduce-scatter that rank 1 never enters."""
    warnings.simplefilter("ignore")
    publisher = Publisher(rank)
    remove = collectives.observe(publisher)
    dist.all_reduce(torch.ones(2))
    found = []
    for launch in (
        lambda: dist.all_reduce(torch.ones(2), async_op=True),
        lambda: dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2), async_op=True),
    ):
        if rank == 0:
            launch()
        collectives.refresh(thorough=True)
        order = state_of(publisher).orders[0]
        found += [order.entered, order.completed]
    remove()
    return tuple(found)  # type: ignore[return-value]


def test_what_a_peer_never_entered_is_known_to_be_incomplete() -> None:
    waiting, absent = run_ranks(2, leave_one_out)
    assert waiting == (2, 1, 3, 1)
    assert absent == (1, 1, 1, 1)


def uneven(rank: int) -> list[tuple[str, int]]:
    publisher = Publisher(rank)
    remove = collectives.observe(publisher)
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(4), received, sent)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    dist.broadcast(torch.ones(3), 1)
    remove()
    return [(operation.operation, operation.numel) for operation in state_of(publisher).operations]


def test_values_that_ranks_may_differ_in_are_not_compared() -> None:
    first, second = run_ranks(2, uneven)
    assert first == second
    assert first == [
        ("all_to_all_single float32", -1),
        ("all_to_all_single float32", 4),
        ("broadcast float32 root 1", 3),
    ]


def in_subgroups(rank: int) -> list[tuple[str, tuple[int, ...], int]]:
    publisher = Publisher(rank)
    remove = collectives.observe(publisher)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=mine)
    dist.broadcast(torch.ones(1), 2 + rank % 2, group=mine)
    dist.barrier()
    remove()
    state = state_of(publisher)
    assert state.operations[-2].operation == f"broadcast float32 root {2 + rank % 2}"
    groups = [state.groups[order.group] for order in state.orders]
    return [
        (group.backend, group.ranks, order.entered)
        for group, order in zip(groups, state.orders, strict=True)
    ]


def test_operations_are_counted_per_group_in_global_ranks() -> None:
    for rank, groups in enumerate(run_ranks(4, in_subgroups)):
        pair = (0, 2) if rank % 2 == 0 else (1, 3)
        assert sorted(groups) == sorted([("gloo", pair, 4), ("gloo", (0, 1, 2, 3), 1)])


def chatter(rank: int) -> list[tuple[int, int, int, int]]:
    """In a group whose positions are not the global ranks: 1 sends twice to 0, once back."""
    publisher = Publisher(rank)
    group = dist.new_group([1, 2])
    remove = collectives.observe(publisher)
    if rank:
        me, other = (1, 2) if rank == 1 else (2, 1)
        for _ in range(2):
            if me == 1:
                dist.send(torch.ones(2), other, group=group, tag=5)
            else:
                dist.recv(torch.empty(2), other, group=group, tag=5)
        if me == 2:
            dist.send(torch.ones(2), other, group=group)
        else:
            dist.recv(torch.empty(2), group=group)
    remove()
    state = state_of(publisher)
    orders = [state.orders[operation.order] for operation in state.operations]
    return [
        (order.kind, order.peer, operation.sequence, operation.tag)
        for order, operation in zip(orders, state.operations, strict=True)
    ]


def test_sends_and_receives_are_counted_per_peer_and_direction() -> None:
    nobody, sender, receiver = run_ranks(3, chatter)
    assert nobody == []
    assert sender[:2] == [(SEND, 2, 1, 5), (SEND, 2, 2, 5)]
    assert sender[2][:2] == (RECEIVE, -1)
    assert receiver == [(RECEIVE, 1, 1, 5), (RECEIVE, 1, 2, 5), (SEND, 1, 1, 0)]


# One process is enough for the rest.


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def taken() -> list[str]:
    """Operators that have a kernel at BackendSelect."""
    key = torch._C.DispatchKey.BackendSelect.name
    names = [f"c10d::{name}" for name in SPECS]
    return [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key)]


def test_the_last_listener_takes_the_kernels_away(alone: None) -> None:
    assert taken() == []
    first, second = Log(), Log()
    remove_first = collectives.observe(first)
    remove_second = collectives.observe(second)
    assert len(taken()) == len(SPECS) >= 20
    dist.all_reduce(torch.ones(1))
    remove_first()
    remove_first()
    dist.barrier()
    assert len(taken()) == len(SPECS)
    remove_second()
    assert taken() == []
    dist.barrier()
    assert [o.name for o in first.entries] == ["all_reduce"]
    assert [o.name for o in second.entries] == ["all_reduce", "barrier"]


def test_another_tools_kernel_is_respected_and_named() -> None:
    other: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    other.impl("barrier", lambda *args: None, "BackendSelect", with_keyset=True)
    with pytest.raises(ScoutError, match=r"c10d::barrier at BackendSelect"):
        collectives.observe(Log())
    assert taken() == ["c10d::barrier"]
    other._destroy()


def test_an_error_of_the_operation_is_passed_on_unchanged(alone: None) -> None:
    def fail() -> BaseException:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        return caught.value

    expected, log = fail(), Log()
    remove = collectives.observe(log)
    found = fail()
    dist.barrier()
    collectives.refresh()
    remove()
    assert (type(found), str(found)) == (type(expected), str(expected))
    assert [o.name for o in log.completions] == ["all_reduce", "barrier"]


class Broken(Log):
    """A listener with a bug."""

    def entered(self, operation: Operation) -> int:
        raise KeyError("bug")


def test_a_bug_in_a_listener_ends_observation_and_not_the_operation(alone: None) -> None:
    good, bad = Log(), Broken()
    remove = [collectives.observe(good), collectives.observe(bad)]
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.all_reduce(x)
    assert x.item() == 1
    assert good.reasons == bad.reasons == ["KeyError: 'bug'"]
    assert len(good.entries) == 1
    for undo in remove:
        undo()
    assert taken() == []


def test_autograd_inference_mode_and_other_threads_are_observed(alone: None) -> None:
    log = Log()
    remove = collectives.observe(log)
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    functional.all_gather_single_autograd(x * 3, 0, dist.group.WORLD).sum().backward()
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
    thread.start()
    thread.join(10)
    remove()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]
    words = [operation.name.removesuffix("_coalesced") for operation in log.entries]
    gather_and_back = ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert words == ["all_reduce", *gather_and_back, "all_reduce"]


def test_many_threads_lose_no_operation(alone: None) -> None:
    log = Log()
    remove = collectives.observe(log)

    def communicate() -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(1))

    threads = [threading.Thread(target=communicate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    collectives.refresh()
    remove()
    assert [operation.sequence for operation in log.entries] == list(range(1, 201))
    assert [operation.sequence for operation in log.completions] == list(range(1, 201))


def test_no_tensor_is_kept_alive_by_an_operation_that_is_complete(alone: None) -> None:
    remove = collectives.observe(Log())
    x = torch.ones(1)
    gone = weakref.ref(x)
    dist.all_reduce(x)
    collectives.refresh()
    del x
    deadline = time.monotonic() + 10  # the backend's own thread lets go of it a moment later
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None
    remove()


def test_a_group_that_is_made_anew_counts_anew() -> None:
    log = Log()
    remove = collectives.observe(log)
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        dist.barrier()
        dist.barrier()
        dist.destroy_process_group()
    remove()
    assert [operation.sequence for operation in log.entries] == [1, 2, 1, 2]
