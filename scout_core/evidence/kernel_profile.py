"""What a shape executes, seen from outside: launches as torch.profiler records them.

Three profilers share one protocol: this one for kernels of any library, the schedule model
(`decision.schedule`) and our own instrumented kernel (`lab.grouped_gemm`).

From outside, a launch shows its kernel, block and grid, and no more. Two things therefore make a
shape `Unseen`, and it is then replayed itself: no launch geometry at all (a CPU), and a grid that
is a multiple of the number of multiprocessors, for such a kernel may be persistent, whose grid says
nothing about its tiles.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from scout_core.decision.catalog import Observation, Shape
from scout_core.decision.schedule import GroupedGemm

NO_GEOMETRY = (
    "torch.profiler sees no launch geometry, because no kernel ran on a GPU: the shape is "
    "replayed itself"
)
_ALIGNMENTS = 256  # largest tile of rows that kernels use

# Note [Alignment class]
# A launch does not show whether its last tile is masked, but the row count tells. Let a be the
# largest power of two that divides the rows. A tile of b rows, b a power of two, has no tail when
# b <= a, and always has one when b > a. So shapes with equal a agree for every such b, and shapes
# with different a never cover each other here. (Rows are cut at 256: larger tiles are not in use.)


class Unseen(NamedTuple):
    """A shape whose execution cannot be told from others'; it is replayed itself."""

    reason: str


class Profiler(Protocol):
    """Observes shapes, one execution each."""

    @property
    def name(self) -> str:
        """Name the kind of observation, for the catalogue file."""
        ...

    def observe(self, shape: Shape) -> Observation | Unseen:
        """Execute the shape once, or compute what it would execute."""
        ...


class KernelLaunch(NamedTuple):
    """One kernel on the device."""

    kernel: str
    block: tuple[int, ...]  # threads
    grid: tuple[int, ...]  # programs

    @property
    def programs(self) -> int:
        """Programs of the launch."""
        total = 1
        for extent in self.grid:
            total *= extent
        return total


class ScheduleProfiler:
    """The schedule model as a profiler: computes, executes nothing."""

    name = "model"

    def __init__(self, gemm: GroupedGemm, *, per_program: bool = False) -> None:
        """Compute for this projection; see `GroupedGemm.observation` for `per_program`."""
        self._gemm = gemm
        self._per_program = per_program

    def observe(self, shape: Shape) -> Observation:
        """Return what the model says."""
        return self._gemm.observation(shape, per_program=self._per_program)


class TorchProfiler:
    """Observe with torch.profiler what a callable launches."""

    name = "torch-profiler"

    def __init__(self, workload: Callable[[Shape], Callable[[], object]], num_sms: int) -> None:
        """Prepare.

        Args:
            workload: given a shape, allocates its tensors and returns the work to observe, forward
                and backward; it is called twice, as the first call may compile.
            num_sms: multiprocessors of the device.
        """
        self._workload = workload
        self._num_sms = num_sms

    def observe(self, shape: Shape) -> Observation | Unseen:
        """Run the shape under the profiler."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not torch.cuda.is_available():
            return Unseen(NO_GEOMETRY)
        work = self._workload(shape)
        work()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            work()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "trace.json")
            recorded.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        return observation_of(shape, trace, self._num_sms)


def observation_of(shape: Shape, trace: Mapping[str, Any], num_sms: int) -> Observation | Unseen:
    """Read an observation out of a trace as `export_chrome_trace` writes it.

    The fingerprint is the sequence of kernels with their blocks, and the alignment class of each
    expert's rows (Note [Alignment class]); the paths are the kernels, counted in programs.
    """
    launches = launches_in(trace)
    if not launches:
        return Unseen(NO_GEOMETRY)
    for launch in launches:
        if launch.programs % num_sms == 0:
            return Unseen(
                f"kernel {launch.kernel} has a multiple of {num_sms} programs, one per "
                "multiprocessor: it may be persistent, and then its grid hides its tiles"
            )
    counts: Counter[str] = Counter()
    for launch in launches:
        counts[_path(launch)] += launch.programs
    rows = (shape,) if isinstance(shape, int) else shape
    aligned = ",".join(str(alignment_class(n)) for n in rows)
    sequence = "; ".join(_path(launch) for launch in launches)
    return Observation(shape, f"{sequence}; rows aligned to {aligned}", dict(counts))


def launches_in(trace: Mapping[str, Any]) -> Sequence[KernelLaunch]:
    """Return the kernel launches of a trace, in order of their start."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: float(event["ts"]))
    return [
        KernelLaunch(
            str(event["name"]), tuple(event["args"]["block"]), tuple(event["args"]["grid"])
        )
        for event in kernels
    ]


def alignment_class(rows: int) -> int:
    """Return the largest power of two up to 256 that divides the rows; 0 for no rows."""
    return min(rows & -rows, _ALIGNMENTS)


def _path(launch: KernelLaunch) -> str:
    return f"{launch.kernel}<{'x'.join(map(str, launch.block))}>"
