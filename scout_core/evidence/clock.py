"""Time one unit of work on the device it runs on.

CUDA work is timed by events on the current stream. CPU work is timed by the calling thread's CPU
time, because wall time on a machine shared by several ranks measures its neighbours; wall time
is kept beside it for communication, which is waiting by nature.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Timing(NamedTuple):
    """How long a unit of work took."""

    compute_s: float
    """What the straggler rule compares: device time on CUDA, thread CPU time on CPU."""
    wall_s: float


class Clock(Protocol):
    """Times a call; tests pass a fake one."""

    @property
    def compares(self) -> str:
        """Name of the time in `compute_s`: "cuda_event" or "thread_cpu_time"."""

    def measure(self, work: Callable[[], object]) -> Timing:
        """Run the work to its end and time it."""


class CpuClock:
    """Thread CPU time and wall time."""

    compares = "thread_cpu_time"

    def measure(self, work: Callable[[], object]) -> Timing:
        wall, cpu = time.perf_counter(), time.thread_time()
        work()
        return Timing(time.thread_time() - cpu, time.perf_counter() - wall)


class CudaClock:
    """CUDA events on the current stream of one device; waits for the end event only."""

    compares = "cuda_event"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, work: Callable[[], object]) -> Timing:
        with torch.cuda.device(self._device):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
            wall = time.perf_counter()
            start.record()
            work()
            end.record()
            end.synchronize()
            return Timing(start.elapsed_time(end) / 1e3, time.perf_counter() - wall)


def clock_for(device: torch.device) -> Clock:
    """Choose the clock of a device.

    Accelerators other than CUDA are timed by wall time around a synchronisation, through
    `torch.accelerator`.
    """
    if device.type == "cuda":
        return CudaClock(device)
    return CpuClock() if device.type == "cpu" else AcceleratorClock()


class AcceleratorClock:
    """Wall time between two synchronisations of the current accelerator."""

    compares = "wall_time"

    def measure(self, work: Callable[[], object]) -> Timing:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        wall = time.perf_counter() - start
        return Timing(wall, wall)
