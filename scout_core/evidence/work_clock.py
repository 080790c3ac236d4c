"""How long this rank itself worked in each step, without waiting for other ranks.

Forward passes of the modules are timed: by the calling thread's CPU time on the CPU, by device
events elsewhere. Pauses of the interpreter come from its own callbacks. Nothing is installed
outside of a window of steps.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from scout_core.evidence.capture import Undo, around_calls, local_of, tensors_of

MOST_MICRO_BATCHES = 16  # the first ones of a step that are timed


class StepWork(NamedTuple):
    """One optimizer step of one rank."""

    seconds: list[float]
    """Forward work of each micro-batch."""
    tokens: list[int]
    """Positions of each micro-batch: batch times sequence length; 0 where that is not known."""
    paused_s: float
    """Pauses of the interpreter for garbage collection."""
    loading_s: float
    """From the end of the step before to the first forward pass, without pauses."""
    wall_s: float
    """From the end of the step before to the end of this one."""


Ended = Callable[[], float]  # seconds of a finished span; may wait for the device


@dataclass
class _Step:
    began_s: float
    ended_s: float = 0.0
    loading_s: float | None = None
    paused_s: float = 0.0
    calls: Counter[int] = field(default_factory=Counter)
    spans: dict[int, list[Ended]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


class WorkClock:
    """Times the steps of one window after another; local, and never raises into training.

    The n-th call of a module in a step belongs to the n-th micro-batch, also when a schedule
    interleaves chunks of the model. What is computed again in a backward pass does not count.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Install nothing yet; modules must not contain one another."""
        self._modules = modules
        self._device = device
        self._undo: list[Undo] = []
        self._steps: list[_Step] = []
        self._paused_at = 0.0
        self._error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """A window is under way."""
        return bool(self._undo)

    def open(self) -> None:
        """Begin a window with the step that comes next."""
        for number, module in enumerate(self._modules):
            self._undo.append(around_calls(module, self._before(number), self._after(number)))
        gc.callbacks.append(self._on_gc)
        self._undo.append(lambda: gc.callbacks.remove(self._on_gc))
        self._steps = [_Step(time.perf_counter())]

    def next_step(self) -> None:
        """The step has ended, and another one of the window begins."""
        self._steps[-1].ended_s = time.perf_counter()
        self._steps.append(_Step(time.perf_counter()))

    def close(self) -> list[StepWork]:
        """End the window with the step that has ended; wait for the device to finish it.

        Raises:
            Exception: what went wrong in a hook.
        """
        steps, error = self._steps, self._error
        if steps:
            steps[-1].ended_s = time.perf_counter()
        self.drop()
        if error is not None:
            raise error
        return [_read(step) for step in steps]

    def drop(self) -> None:
        """End the window, if one is open, and forget it."""
        for undo in self._undo:
            undo()
        self._undo, self._steps, self._error = [], [], None

    def _before(self, number: int) -> Callable[[nn.Module, Any, Any], Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            try:
                return self._begin(number, module.training, args, kwargs)
            except Exception as error:  # noqa: BLE001 -- guard: a hook of SCOUT never raises
                self._error = error
                return None

        return before

    def _begin(self, number: int, training: bool, args: Any, kwargs: Any) -> Any:
        step = self._steps[-1]
        if step.loading_s is None:
            step.loading_s = time.perf_counter() - step.began_s - step.paused_s
        is_recomputed = torch._C._current_graph_task_id() != -1  # checked with torch 2.13
        if not training or is_recomputed:
            return None
        micro_batch = step.calls[number]
        step.calls[number] += 1
        if micro_batch >= MOST_MICRO_BATCHES:
            return None
        if micro_batch not in step.tokens:
            step.tokens[micro_batch] = _positions(args, kwargs)
        return step.spans.setdefault(micro_batch, []), _start(self._device)

    def _after(self, number: int) -> Callable[[Any], None]:
        def after(begun: Any) -> None:
            if begun is None:
                return
            spans, end = begun
            try:
                spans.append(end())
            except Exception as error:  # noqa: BLE001 -- guard: a hook of SCOUT never raises
                self._error = error

        return after

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._paused_at = time.perf_counter()
        elif self._steps:
            self._steps[-1].paused_s += time.perf_counter() - self._paused_at


def _start(device: torch.device) -> Callable[[], Ended]:
    """Begin a span; the result ends it, and its result tells the seconds."""
    if device.type == "cpu":
        cpu = time.thread_time()

        def end_cpu() -> Ended:
            seconds = time.thread_time() - cpu
            return lambda: seconds

        return end_cpu
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    first.record()

    def end() -> Ended:
        last.record()

        def seconds() -> float:
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        return seconds

    return end


def _positions(args: Any, kwargs: Any) -> int:
    """Batch times sequence length of token ids, or of activations with a last axis of features."""
    for tensor in tensors_of((args, kwargs)):
        local = local_of(tensor)
        if local.dim() >= 2:
            return local.numel() // (local.shape[-1] if local.is_floating_point() else 1)
    return 0


def _read(step: _Step) -> StepWork:
    order = sorted(step.spans)
    return StepWork(
        [sum(ended() for ended in step.spans[number]) for number in order],
        [step.tokens[number] for number in order],
        step.paused_s,
        step.loading_s or 0.0,
        step.ended_s - step.began_s,
    )
