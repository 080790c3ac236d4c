"""Gather and broadcast evidence: over gloo groups of SCOUT's own, or between threads in tests.

Every rank of a group makes the same calls in the same order. Nothing here uses the training
communicator, and every wait ends at a deadline.

# Note [Names of groups]

Members meet in the job's store under the name of their group. `new_group` with local
synchronisation makes the name from the number of groups that a process is in already, and the first
and the last pipeline stage are in more than the others: their members would wait for each other
under different names. Without local synchronisation every rank must create every group. So groups
get names here that members agree on: all ranks create exchanges together.
The private functions were checked with torch 2.13.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d as c10d

Ranks = tuple[int, ...]
_numbers = itertools.count()


class Exchange(Protocol):
    """How the ranks of a job tell each other what they saw."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""

    def join(self, groups: Iterable[Ranks]) -> None:
        """Prepare groups that contain this rank; all members call it in the same order."""

    def all_gather(self, payload: bytes, ranks: Ranks) -> list[bytes]:
        """Return the payload of every member, in the order of `ranks` (ascending global ranks)."""

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum over all ranks of the job."""

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        """Overwrite `tensor` (contiguous, same shape and dtype everywhere) with the source's."""

    def reduce(self, tensor: torch.Tensor, ranks: Ranks) -> None:
        """Sum `tensor` over the members, in place and on its device; waits for the result."""

    def all_to_all(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        ranks: Ranks,
    ) -> None:
        """Send each member its part of `sent` (elements,), and wait for theirs in `received`.

        Args:
            splits: elements to and from each member, in the order of `ranks`.
        """

    def barrier(self, ranks: Ranks) -> None:
        """Return when every member has called it."""

    def close(self) -> None:
        """Give the groups back."""


class GroupExchange:
    """Exchange over process groups: gloo for bytes, the training backend for device tensors."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        """Create the job-wide group; a collective call.

        Args:
            device: where the tensors of `broadcast` live.
            timeout_s: deadline of each collective; a late peer is a RuntimeError here.
        """
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = device
        self._number = next(_numbers)
        self._control: dict[Ranks, dist.ProcessGroup] = {}
        self._data: dict[Ranks, dist.ProcessGroup] = {}
        self._rank = dist.get_rank()
        world = tuple(range(dist.get_world_size()))
        self._world = world
        self.join([world])

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._world)

    def join(self, groups: Iterable[Ranks]) -> None:
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self._control:
                self._control[ranks] = self._new_group(ranks, "gloo")
                if self._device.type != "cpu":
                    backend = dist.get_default_backend_for_device(self._device)
                    self._data[ranks] = self._new_group(ranks, backend)

    def all_gather(self, payload: bytes, ranks: Ranks) -> list[bytes]:
        if len(ranks) == 1:
            return [payload]
        group = self._control[ranks]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
        lengths = [int(size) for size in sizes]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(parts, mine, group=group)
        return [
            part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
        ]

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        total = torch.tensor(list(values), dtype=torch.int64)
        if self.world_size > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self._control[self._world])
        return [int(value) for value in total]

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        if len(ranks) > 1:
            groups = self._control if tensor.device.type == "cpu" else self._data
            dist.broadcast(_as_bytes(tensor), source, group=groups[ranks])

    def reduce(self, tensor: torch.Tensor, ranks: Ranks) -> None:
        groups = self._control if tensor.device.type == "cpu" else self._data
        dist.all_reduce(tensor, group=groups[ranks])

    def all_to_all(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        ranks: Ranks,
    ) -> None:
        groups = self._control if sent.device.type == "cpu" else self._data
        to, come = map(list, splits)
        dist.all_to_all_single(received, sent, come, to, group=groups[ranks])

    def barrier(self, ranks: Ranks) -> None:
        self.all_gather(b"", ranks)

    def close(self) -> None:
        groups = (*self._control.values(), *self._data.values())
        for group in groups if dist.is_initialized() else ():  # else: the job destroyed all groups
            dist.destroy_process_group(group)
        self._control.clear()
        self._data.clear()

    def _new_group(self, ranks: Ranks, backend: str) -> dist.ProcessGroup:
        """Create a group of its members alone; see Note [Names of groups]."""
        members = xxhash.xxh3_128_hexdigest(repr(ranks).encode())
        name = f"scout/{self._number}/{backend}/{members}"
        with _unsplit(c10d._get_default_group()):
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(self.rank),
                list(ranks),
                dist.Backend(backend),
                c10d._get_default_store(),
                c10d.GroupName(name),
                timeout=self._timeout,
            )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        return group


@contextlib.contextmanager
def _unsplit(world: dist.ProcessGroup) -> Iterator[None]:
    """Let new groups have communicators of their own.

    A job that is bound to its device splits them off the training communicator, which is a
    collective of all its ranks (`ncclCommSplit`), not of the members alone.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def gather_once(part: bytes, timeout_s: float) -> list[bytes]:
    """Return what every rank of the job says, by rank; a collective over a group of its own."""
    exchange = GroupExchange(torch.device("cpu"), timeout_s)
    told = exchange.all_gather(part, tuple(range(exchange.world_size)))
    exchange.close()
    return told


class LocalExchange:
    """Exchange between threads of one process, for tests that are not about transport."""

    def __init__(self, rank: int, hall: LocalHall) -> None:
        self._rank = rank
        self._hall = hall

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._hall.world_size

    def join(self, groups: Iterable[Ranks]) -> None:
        return None

    def all_gather(self, payload: bytes, ranks: Ranks) -> list[bytes]:
        return self._hall.meet(self._rank, ranks, payload)

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        everyone = tuple(range(self.world_size))
        rows = self._hall.meet(self._rank, everyone, list(values))
        return [max(column) for column in zip(*rows, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Ranks) -> None:
        copies = self._hall.meet(self._rank, ranks, tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(copies[ranks.index(source)])

    def reduce(self, tensor: torch.Tensor, ranks: Ranks) -> None:
        copies = self._hall.meet(self._rank, ranks, tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(torch.stack(copies).sum(0))

    def all_to_all(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        ranks: Ranks,
    ) -> None:
        place = ranks.index(self._rank)
        mine = torch.split(sent.detach().clone(), list(splits[0]))
        parts = self._hall.meet(self._rank, ranks, mine)
        received.copy_(torch.cat([theirs[place] for theirs in parts]))

    def barrier(self, ranks: Ranks) -> None:
        self._hall.meet(self._rank, ranks, None)

    def close(self) -> None:
        return None


class LocalHall:
    """Where the threads of a `LocalExchange` meet."""

    def __init__(self, world_size: int, timeout_s: float = 20.0) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._arrived: dict[tuple[Ranks, int], dict[int, Any]] = {}
        self._turns: dict[tuple[Ranks, int], int] = {}
        self._changed = threading.Condition()

    def meet(self, rank: int, ranks: Ranks, value: Any) -> list[Any]:
        """Return the values of all members.

        Raises:
            TimeoutError: a member did not come.
        """
        with self._changed:
            turn = self._turns.get((ranks, rank), 0)
            self._turns[ranks, rank] = turn + 1
            here = self._arrived.setdefault((ranks, turn), {})
            here[rank] = value
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(here) == len(ranks), self._timeout_s):
                late = sorted(set(ranks) - set(here))
                raise TimeoutError(f"ranks {late} did not come within {self._timeout_s} s")
            return [here[member] for member in ranks]


def run_threads(
    world_size: int, body: Callable[[LocalExchange], Any], timeout_s: float = 20.0
) -> list[Any]:
    """Call `body(exchange)` once per rank, each in a thread, and return the results in rank order.

    Raises:
        Exception: the first rank's exception, by rank.
        TimeoutError: a rank did not return in time.
    """
    hall = LocalHall(world_size, timeout_s)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = body(LocalExchange(rank, hall))
        except BaseException as error:  # noqa: BLE001 -- raised again in the calling thread
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[min(errors)]
    if len(results) < world_size:
        late = sorted(set(range(world_size)) - set(results))
        raise TimeoutError(f"ranks {late} did not return within {timeout_s} s")
    return [results[rank] for rank in range(world_size)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View as bytes: backends then need not know the dtype (fp8, bool, complex)."""
    assert tensor.is_contiguous()
    flat = tensor.detach().reshape(-1)
    if flat.dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        return flat
    return flat.view(torch.uint8)
