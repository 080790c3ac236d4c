"""The c10d observer: every collective, send and receive of this process, before it can block.

All of torch.distributed (DDP's C++ reducer, FSDP2, DTensor, functional and compiled collectives,
object collectives, point-to-point, pipelines) ends in a `c10d::*` operator of the dispatcher, whose
BackendSelect key is free. A kernel there sees the call first and hands it on unchanged.

# Note [One observer per process]
A second kernel at the same key would silently replace the first. So this module holds one registry
per process; listeners come and go, the first one installs the kernels and the last one takes
them away again. When another tool already holds the key, nothing is installed and it is said.

# Note [Completion without waiting]
The kernel returns when an operation is launched, not when it is done. For tensors on the CPU the
`Work` of an operation is kept until `is_completed()` says so, asked at the next operation of the
group and by `refresh()`. For other devices nothing is kept, because a `Work` keeps its tensors
alive and asking a CUDA event can block; those, and gloo's reduce-scatter, whose `Work` never says
so, are looked up in torch's Flight Recorder, by `refresh(thorough=True)` only.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from scout_core.errors import ScoutError
from scout_core.evidence.c10d_operators import Spec, operators
from scout_core.evidence.ring import COLLECTIVE

_MAX_PENDING = 256  # per group or channel; a send that nobody waits for never completes
# Private API of torch, checked with 2.13.0.
_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_unbox_group = c10d.ProcessGroup.unbox
_unbox_work = c10d.Work.unbox
_LAUNCHING = object()


class Pending:
    """Operations of one order (a group, or one direction with a peer) not known to be complete."""

    __slots__ = ("sequence", "tracked", "untracked")

    def __init__(self) -> None:
        self.sequence = 0
        """Number of the last operation entered since observation began."""
        self.tracked: deque[Operation] = deque()
        self.untracked: deque[Operation] = deque()

    @property
    def completed(self) -> int | None:
        """Every operation up to this one is complete; None when that cannot be told."""
        tracked, untracked = self.tracked, self.untracked
        if untracked and not (tracked and tracked[0].sequence < untracked[0].sequence):
            return untracked[0].sequence - 1 if untracked[0].certain else None
        return tracked[0].sequence - 1 if tracked else self.sequence


class Group:
    """One process group of this process."""

    def __init__(self, handle: c10d.ProcessGroup, ranks: tuple[int, ...]) -> None:
        """Start counting; `ranks`: global, in group order, empty when torch does not say."""
        self.name = str(handle.group_name)
        self.ranks = ranks
        self.backend = str(handle.name())
        self.collectives = Pending()
        self.channels: dict[tuple[int, int], Pending] = {}
        """(SEND or RECEIVE, global rank of the peer) -> operations."""
        self._handle: weakref.ref[Any] = weakref.ref(handle)

    def belongs_to(self, handle: c10d.ProcessGroup) -> bool:
        """Tell whether this is the group of that handle, and not a later one of equal name."""
        return self._handle() is handle

    @property
    def native_sequence(self) -> int:
        """How many operations the backend has counted, -1 when it does not count."""
        handle = self._handle()
        try:
            return -1 if handle is None else int(handle._get_sequence_number_for_group())
        except RuntimeError:  # a backend without counters
            return -1

    def global_rank(self, position: int) -> int:
        """Translate a position in the group; given back as it is when members are unknown."""
        return self.ranks[position] if 0 <= position < len(self.ranks) else position

    def order(self, kind: int, peer: int) -> Pending:
        """Return what an operation is counted with."""
        if kind == COLLECTIVE:
            return self.collectives
        key = (kind, peer)
        found = self.channels.get(key)
        if found is None:
            found = self.channels[key] = Pending()
        return found


class Operation:
    """One operation that was entered; it holds no tensor."""

    __slots__ = (
        "certain",
        "dtype",
        "group",
        "kind",
        "name",
        "native",
        "notes",
        "numel",
        "order",
        "own_numel",
        "peer",
        "reduce",
        "root",
        "sequence",
        "tag",
        "tracked",
        "work",
    )

    def __init__(self, name: str, kind: int, group: Group) -> None:
        self.name = name
        """"all_reduce", "send", ...: the same word for every caller."""
        self.kind = kind
        """COLLECTIVE, SEND or RECEIVE."""
        self.group = group
        self.order: Pending = group.collectives
        self.sequence = 0
        """From 1: in its group, or among the sends to (receives from) this peer."""
        self.dtype: torch.dtype | None = None
        self.numel = -1
        """Elements that must be equal on all members; -1 where they may differ."""
        self.own_numel = 0
        """Elements of this rank's sized tensors."""
        self.reduce = -1
        """Number of the reduce operation in `ReduceOp.RedOpType`; -1 without one."""
        self.root = -1
        """Global rank; -1 without one."""
        self.peer = -1
        """Global rank at the other end; -1 for a collective or for any source."""
        self.tag = 0
        self.tracked = True
        """Its `Work` tells when it is complete; see Note [Completion without waiting]."""
        self.certain = True
        """That it is pending is known, not just assumed."""
        self.native = -1
        """Its number in the backend; only for what is not tracked."""
        self.work: Any = _LAUNCHING
        self.notes: list[tuple[Listener, Any]] = []


class Listener(Protocol):
    """Who wants to know. Called on the thread that communicates: be quick and never block."""

    def entered(self, operation: Operation) -> Any:
        """An operation is about to start; the result is given back to `completed`."""

    def completed(self, operation: Operation, note: Any) -> None:
        """An operation is complete; called later, by whoever noticed it."""

    def certain(self, order: Pending) -> None:
        """What is pending has been looked up: `order.completed` holds."""

    def disarmed(self, reason: str) -> None:
        """An internal error has ended observation; nothing more will be seen."""


class _Registry:
    """The listeners of this process, and the kernels that feed them."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may communicate while this thread is in here.
        self._lock = threading.RLock()
        self._listeners: tuple[Listener, ...] = ()
        self._library: Any = None
        self._groups: dict[str, Group] = {}

    def add(self, listener: Listener) -> Callable[[], None]:
        with self._lock:
            if self._library is None:
                self._install()
            self._listeners = (*self._listeners, listener)

        def remove() -> None:
            with self._lock:
                self._listeners = tuple(x for x in self._listeners if x is not listener)
                if not self._listeners:
                    self._uninstall()

        return remove

    def refresh(self, thorough: bool) -> None:
        with self._lock:
            groups = list(self._groups.values())
            for group in groups:
                for order in (group.collectives, *group.channels.values()):
                    self._settle(order)
            unsure = [group for group in groups if group.collectives.untracked]
        if thorough and unsure:
            retired = _retired()  # takes long: without the lock
            with self._lock:
                for group in unsure:
                    self._look_up(group.collectives, retired.get(group.name, {}))

    def _install(self) -> None:
        found = operators()
        for name in found:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect"):
                raise ScoutError(
                    f"another tool already observes c10d::{name} at BackendSelect, where a second "
                    "observer would silently replace it; switch one of the two off"
                )
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, spec in found.items():
            operator = getattr(torch.ops.c10d, name).default
            library.impl(name, self._kernel(spec, operator), "BackendSelect", with_keyset=True)
        self._library = library

    def _uninstall(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        self._groups.clear()

    def _kernel(self, spec: Spec, operator: Any) -> Callable[..., Any]:
        redispatch = operator._handle.redispatch_boxed
        enter, launched = self._enter, self._launched

        def kernel(keyset: Any, *args: Any) -> Any:
            operation = enter(spec, args)
            try:
                result = redispatch(keyset & _AFTER, *args)
            except BaseException:
                launched(operation, None)
                raise
            launched(operation, result)
            return result

        return kernel

    def _enter(self, spec: Spec, args: tuple[Any, ...]) -> Operation | None:
        try:
            with self._lock:
                listeners = self._listeners
                if not listeners:
                    return None
                operation = self._read(spec, args)
                operation.notes = [(x, x.entered(operation)) for x in listeners]
                return operation
        except Exception as error:  # noqa: BLE001 -- the guard of this hook
            self._disarm(error)
            return None

    def _launched(self, operation: Operation | None, result: Any) -> None:
        if operation is None:
            return
        try:
            with self._lock:
                self._keep(operation, result[-1] if type(result) is tuple else result)
        except Exception as error:  # noqa: BLE001 -- the guard of this hook
            self._disarm(error)

    def _read(self, spec: Spec, args: tuple[Any, ...]) -> Operation:
        group = self._group(_unbox_group(args[spec.group]))
        operation = Operation(spec.word, spec.kind, group)
        sized = spec.sized(args)
        tensors = sized if type(sized) is list else [sized]
        if tensors:
            operation.dtype = tensors[0].dtype
            operation.tracked = spec.completes and tensors[0].is_cpu
            operation.own_numel = sum([tensor.numel() for tensor in tensors])
            if spec.equal_size(args):
                operation.numel = operation.own_numel
        if spec.reduce >= 0:
            operation.reduce = args[spec.reduce].op()
        if spec.root >= 0:
            operation.root = group.global_rank(args[spec.root])
        if spec.tag >= 0:
            operation.tag = args[spec.tag]
        if spec.kind != COLLECTIVE:
            operation.peer = group.global_rank(args[spec.peer]) if spec.peer >= 0 else -1
        order = operation.order = group.order(spec.kind, operation.peer)
        if order.tracked:
            self._settle(order)
        order.sequence = operation.sequence = order.sequence + 1
        queue = order.tracked if operation.tracked else order.untracked
        queue.append(operation)
        if len(queue) > _MAX_PENDING:
            queue.popleft().work = None
        return operation

    def _group(self, handle: c10d.ProcessGroup) -> Group:
        known = self._groups.get(handle.group_name)
        if known is not None and known.belongs_to(handle):
            return known
        try:
            ranks = tuple(dist.get_process_group_ranks(handle))
        except KeyError:  # made in C++, unknown to torch.distributed
            ranks = ()
        group = Group(handle, ranks)
        self._groups[group.name] = group
        return group

    def _keep(self, operation: Operation, work: Any) -> None:
        """Take note that an operation is launched; without a work it is already complete."""
        operation.work = work
        if not operation.tracked:
            operation.certain = False
            operation.native = operation.group.native_sequence
            operation.work = None
        elif work is None:
            self._settle(operation.order)

    def _settle(self, order: Pending) -> None:
        """Finish what is complete: an operation, and all that were entered before it."""
        while order.tracked and _is_complete(order.tracked[0]):
            operation = order.tracked.popleft()
            while order.untracked and order.untracked[0].sequence < operation.sequence:
                self._finish(order.untracked.popleft())
            self._finish(operation)

    def _look_up(self, order: Pending, retired: dict[int, bool]) -> None:
        """Use what torch's Flight Recorder says where a `Work` does not tell."""
        while order.untracked and retired.get(order.untracked[0].native):
            self._finish(order.untracked.popleft())
        for operation in order.untracked:
            operation.certain = operation.native in retired
        for listener in self._listeners:
            listener.certain(order)

    def _finish(self, operation: Operation) -> None:
        operation.work = None
        for listener, note in operation.notes:
            if listener in self._listeners:
                listener.completed(operation, note)

    def _disarm(self, error: Exception) -> None:
        """Stop observing in this process; the job goes on."""
        with self._lock:
            listeners, self._listeners = self._listeners, ()
        for listener in listeners:
            listener.disarmed(f"{type(error).__name__}: {error}")


def _is_complete(operation: Operation) -> bool:
    work = operation.work
    if work is _LAUNCHING:
        return False
    if type(work) is torch.ScriptObject:
        work = operation.work = _unbox_work(work)
    return work is None or bool(work.is_completed())


def _retired() -> dict[str, dict[int, bool]]:
    """Group name -> number of the operation in its backend -> is it complete?"""
    dump = getattr(c10d, "_dump_fr_trace_json", None)  # private API, checked with 2.13.0
    if dump is None:
        return {}
    found: dict[str, dict[int, bool]] = {}
    for entry in json.loads(dump(includeCollectives=True)).get("entries", ()):
        done = bool(entry["retired"]) or entry["state"] == "completed"
        found.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = done
    return found


_registry = _Registry()


def observe(listener: Listener) -> Callable[[], None]:
    """Tell a listener about every operation of this process; returns the undo.

    Raises:
        ScoutError: another tool holds the place in the dispatcher.
    """
    return _registry.add(listener)


def refresh(*, thorough: bool = False) -> None:
    """Notice what has completed since; never waits for an operation.

    Args:
        thorough: also read torch's Flight Recorder (about 0.2 s with a full buffer): for a job
            that stands still.
    """
    _registry.refresh(thorough)
