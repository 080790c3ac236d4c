"""What a trainer publishes about itself: step, phase, boundaries and operations.

All of it goes into the shared-memory ring (`evidence.ring`), where an observer agent reads it even
when this process is stuck or dead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import typing_extensions
from torch.distributed import ReduceOp

from scout_core.decision.snapshots import Phase
from scout_core.evidence.collectives import Group, Operation, Pending
from scout_core.evidence.ring import FAILED
from scout_core.evidence.ring_writer import RingWriter
from scout_core.evidence.stack import is_inside

Undo = Callable[[], None]

# The phases that a training loop runs through by itself; all others are entered on purpose.
_LOOP: Final = (Phase.UNKNOWN, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
# What may be slow before the first step has ended: it then counts as initialisation.
_SLOW_AT_FIRST: Final = (*_LOOP, Phase.DATA)
_REDUCTIONS: Final = {op.value: name.lower() for name, op in ReduceOp.RedOpType.__members__.items()}


class Publisher:
    """Publishes one trainer's progress and, as a listener of `collectives`, its operations.

    Phases belong to the training thread; operations are published from any thread.
    """

    def __init__(self, rank: int) -> None:
        """Create the ring; the job is in its initialisation until the first `end_step`."""
        self.ring = RingWriter(rank)
        self.step = 0
        """Optimizer steps that have ended."""
        self.blind = ""
        """Why operations are no longer seen; empty while they are."""
        self._base = Phase.INITIALIZE
        self._entered: list[Phase] = []
        self._operation = 0
        self._phase_ids = {phase: self.ring.text(phase.value) for phase in Phase}
        self._phase_id = self._phase_ids[Phase.INITIALIZE]
        self._sites = CallSites(self.ring)
        self._groups: dict[Group, int] = {}
        self._orders: dict[Pending, int] = {}
        self._names: dict[tuple[Any, ...], int] = {}
        self.boundary()

    @property
    def phase(self) -> Phase:
        """The phase that is published now."""
        top = self._entered[-1] if self._entered else self._base
        if self._base is Phase.INITIALIZE and top in _SLOW_AT_FIRST:
            return Phase.INITIALIZE
        return top

    def boundary(self, detail: int = 0) -> None:
        """Publish that the training thread is at a boundary; `detail`: id of a text."""
        self._operation += 1
        self.ring.progress(self.step, self._phase_id, self._operation, detail)

    def enter_loop_phase(self, phase: Phase, detail: int) -> None:
        """Note forward, backward or optimizer; a phase that was entered on purpose stays."""
        if self._base in _LOOP and self._base is not phase:
            self._base = phase
            self._phase_id = self._phase_ids[self.phase]
        self.boundary(detail)

    @contextlib.contextmanager
    def during(self, phase: Phase, detail: str = "") -> Iterator[None]:
        """Publish a phase for a block of the training thread."""
        self._entered.append(phase)
        self._announce(detail)
        try:
            yield
        finally:
            self._entered.pop()
            self._announce()

    def end_step(self, step: int) -> None:
        """Publish that optimizer step `step` has ended; the first one ends initialisation."""
        self.step = step
        self._operation = 0
        self._base = Phase.UNKNOWN
        self._announce()

    def fail(self, error: BaseException) -> None:
        """Publish that this trainer ends by an exception."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self.ring.end(FAILED, text[:500])

    def entered(self, operation: Operation) -> tuple[int, int] | None:
        """Publish an operation before it starts."""
        order = self._orders.get(operation.order)
        if order is None:
            order = self._add_order(operation)
        if order < 0:
            return None
        key = (operation.name, operation.dtype, operation.reduce, operation.root)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self.ring.text(_describe(operation))
        number = self.ring.enter(
            order,
            operation.sequence,
            name,
            numel=operation.numel,
            tag=operation.tag,
            step=self.step,
            phase=self._phase_id,
            site=self._sites.here(),
        )
        if not operation.tracked:
            self.ring.set_completed(order, None)
        return number, order

    def completed(self, operation: Operation, note: tuple[int, int] | None) -> None:
        """Mark an operation complete."""
        if note is not None:
            self.ring.complete(*note, operation.order.completed, progress=operation.tracked)

    def certain(self, order: Pending) -> None:
        """Publish what is known of completion after it was looked up."""
        index = self._orders.get(order, -1)
        if index >= 0:
            self.ring.set_completed(index, order.completed)

    def disarmed(self, reason: str) -> None:
        """Remember why operations are no longer seen."""
        self.blind = reason

    def _announce(self, detail: str = "") -> None:
        self._phase_id = self._phase_ids[self.phase]
        self.boundary(self.ring.text(detail))

    def _add_order(self, operation: Operation) -> int:
        group = operation.group
        index = self._groups.get(group)
        if index is None:
            index = self._groups[group] = self.ring.add_group(
                group.name, group.ranks, group.backend
            )
        order = self.ring.add_order(index, operation.kind, operation.peer)
        self._orders[operation.order] = order
        return order


class CallSites:
    """Finds the line outside of torch that issued an operation, in about a microsecond."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._known: dict[tuple[str, int, int], int] = {}
        self._skipped: dict[str, bool] = {}

    def here(self) -> int:
        """Return the text id of "file.py:12 function" for the calling thread."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            path = code.co_filename
            skipped = self._skipped.get(path)
            if skipped is None:
                skipped = self._skipped[path] = is_internal(path)
            if not skipped:
                key = (path, code.co_firstlineno, frame.f_lasti)
                known = self._known.get(key)
                if known is None:
                    site = f"{path}:{frame.f_lineno} {code.co_name}"
                    known = self._known[key] = self._ring.text(site)
                return known
            frame = frame.f_back  # type: ignore[assignment]
        return 0


INTERNAL: Final = (
    str(Path(torch.__file__).parent) + "/",
    str(Path(__file__).parent) + "/",  # scout_core.evidence
    str(Path(__file__).parent.parent / "integration") + "/",
    str(Path(typing_extensions.__file__)),  # wraps deprecated functions of torch
)
"""Prefixes of source paths that are no place a user can act on."""


def is_internal(path: str) -> bool:
    """Tell whether a source file is torch's, SCOUT's or Python's: no place a user can act on."""
    return is_inside(path, INTERNAL)


def watch_layers(publisher: Publisher, layers: Mapping[str, torch.nn.Module]) -> Undo:
    """Publish each layer's forward and backward; compiled code is left as it is.

    Args:
        layers: qualified name -> module.
    """
    handles: list[Any] = []
    for name, module in layers.items():
        forward = publisher.ring.text(f"forward {name}")
        backward = publisher.ring.text(f"backward {name}")
        handles.append(module.register_forward_pre_hook(_forward_hook(publisher, forward)))
        handles.append(module.register_forward_hook(_backward_hook(publisher, backward)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def watch_optimizer(publisher: Publisher, optimizer: torch.optim.Optimizer) -> Undo:
    """Publish the start of each optimizer step."""
    detail = publisher.ring.text("optimizer step")

    def before(*_: Any) -> None:
        publisher.enter_loop_phase(Phase.OPTIMIZER, detail)

    handle = optimizer.register_step_pre_hook(before)
    return handle.remove


def watch_loader(publisher: Publisher, loader: Iterable[Any]) -> Undo:
    """Publish the phase "data" whenever the loop waits for its next batch.

    Iterating looks `__iter__` up on the class, so the loader gets a subclass of its own class.
    """
    original = type(loader)
    namespace = {"__iter__": _watched_iteration(publisher, original), "__module__": __name__}
    loader.__class__ = type(original.__name__, (original,), namespace)

    def remove() -> None:
        loader.__class__ = original

    return remove


def _watched_iteration(publisher: Publisher, original: Any) -> Callable[[Any], Iterator[Any]]:
    def iterate(self: Any) -> Iterator[Any]:
        with publisher.during(Phase.DATA, "data loader starts"):
            batches = original.__iter__(self)
        while True:
            with publisher.during(Phase.DATA, "next batch"):
                try:
                    batch = next(batches)
                except StopIteration:
                    break
            yield batch
        publisher.boundary(publisher.ring.text("data loader is exhausted"))

    return iterate


def _forward_hook(publisher: Publisher, detail: int) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            publisher.enter_loop_phase(Phase.FORWARD, detail)

    return hook


def _backward_hook(publisher: Publisher, detail: int) -> Callable[..., None]:
    def gradient_arrived(_: torch.Tensor) -> None:
        publisher.enter_loop_phase(Phase.BACKWARD, detail)

    def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(gradient_arrived)  # type: ignore[no-untyped-call]

    return hook


def _describe(operation: Operation) -> str:
    words = [operation.name]
    if operation.dtype is not None:
        words.append(str(operation.dtype).removeprefix("torch."))
    if operation.reduce >= 0:
        words.append(_REDUCTIONS.get(operation.reduce, f"reduction {operation.reduce}"))
    if operation.root >= 0:
        words.append(f"root {operation.root}")
    return " ".join(words)
