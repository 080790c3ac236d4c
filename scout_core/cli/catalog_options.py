"""Options of `scout catalog build`, from text to values."""

from __future__ import annotations

import enum
import pathlib
from typing import TYPE_CHECKING, Any

from scout_core.decision.catalog import Shape
from scout_core.decision.environment import Environment
from scout_core.decision.schedule import GroupedGemm, Tile, uniform
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import read_json

if TYPE_CHECKING:
    from scout_core.evidence.kernel_profile import Profiler


class Source(enum.Enum):
    """Who says what a shape executes."""

    MODEL = "model"  # decision.schedule computes it
    TRITON = "triton"  # our kernel counts it, under Triton's interpreter when there is no GPU
    TORCH_PROFILER = "torch-profiler"  # torch.profiler sees launches; on a CPU it sees none


def parse_rows(text: str) -> range:
    """Read "FIRST:LAST" or "FIRST:LAST:STEP", LAST included; rows are padded to STEP.

    Raises:
        ScoutError: not of that form, empty, or no multiples of STEP.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise ScoutError(f"--rows {text!r} must be FIRST:LAST or FIRST:LAST:STEP, as in 16:2048:16")
    first, last, step = (*map(int, parts), 1)[:3]
    if step < 1 or last < first:
        raise ScoutError(f"--rows {text!r} holds no row count; use FIRST <= LAST and STEP >= 1")
    if first % step:
        raise ScoutError(
            f"--rows {text!r} begins with {first}, which padding to multiples of {step} never "
            "makes; begin with a multiple of STEP"
        )
    return range(first, last + 1, step)


def parse_tile(option: str, text: str) -> Tile:
    """Read "32x128x64": rows, columns, reduction.

    Raises:
        ScoutError: not three powers of two.
    """
    sizes = [int(part) for part in text.split("x") if part.isdigit()]
    if len(sizes) != 3 or text.count("x") != 2 or any(n < 1 or n & (n - 1) for n in sizes):
        raise ScoutError(
            f"{option} {text!r} must be ROWSxCOLUMNSxREDUCTION, powers of two, as in 32x128x64"
        )
    return Tile(*sizes)


def admissible(experts: int, rows: range, vectors: pathlib.Path | None) -> tuple[Shape, ...]:
    """Return the shapes to observe: equal rows for all experts, and the vectors of a file.

    Raises:
        ScoutError: the file is not a list of row vectors of that many experts, or `rows` has a
            step, to which all rows are padded, and a vector is no multiple of it.
    """
    shapes = dict.fromkeys(uniform(experts, n) for n in rows)
    for vector in read_json(vectors, "a list of row vectors") if vectors else ():
        if not isinstance(vector, list) or len(vector) != experts:
            raise ScoutError(
                f"{vector!r} in {vectors} must list the rows of each of the {experts} experts"
            )
        if any(type(n) is not int or n < 0 or n % rows.step for n in vector):
            raise ScoutError(
                f"{vector!r} in {vectors} must hold multiples of {rows.step}, the STEP of --rows: "
                "rows of these experts are padded to it"
            )
        shapes[tuple(vector)] = None
    return tuple(shapes)


def fields_here(overrides: pathlib.Path | None) -> dict[str, Any]:
    """Return the environment fields of this machine, replaced by those of a JSON file.

    Raises:
        ScoutError: the file is not a JSON object.
    """
    from scout_core.evidence.environment import machine

    values = read_json(overrides, "environment fields") if overrides else {}
    if not isinstance(values, dict):
        raise ScoutError(f"{overrides} must hold one JSON object of environment fields")
    return machine() | values


def live_environment(stored: Environment, overrides: pathlib.Path | None) -> Environment:
    """Return what `stored` would be on this machine today: what the job decides stays."""
    from scout_core.evidence.environment import kernel_version

    version = kernel_version(stored.kernel_library) or stored.kernel_version
    here = stored.to_json() | {"kernel_version": version} | fields_here(overrides)
    return Environment.from_json(here, str(overrides or "this machine"))


def make_profiler(
    source: Source, gemm: GroupedGemm, dtype: str, per_program: bool
) -> tuple[Profiler, dict[str, str]]:
    """Return the profiler, and the environment fields that say which kernels it observes.

    Raises:
        ScoutError: options that do not go together, or a missing package.
    """
    from scout_core.evidence.environment import OWN_KERNEL, TORCH_KERNEL, TORCH_SETTINGS
    from scout_core.evidence.kernel_profile import ScheduleProfiler

    if per_program and source is not Source.MODEL:
        raise ScoutError(f"--per-program needs --source model, not {source.value}")
    if source is Source.TORCH_PROFILER:
        return _torch_profiler(gemm, dtype), _kernel(TORCH_KERNEL, TORCH_SETTINGS, dtype)
    if dtype != "float32":
        raise ScoutError(f"--dtype {dtype} needs --source torch-profiler; our kernel is float32")
    settings = gemm.settings + (", paths per program" if per_program else "")
    fields = _kernel(OWN_KERNEL, settings, dtype)
    if source is Source.MODEL:
        return ScheduleProfiler(gemm, per_program=per_program), fields
    from scout_core.lab.grouped_gemm import TritonProfiler

    return TritonProfiler(gemm, _device()), fields


def _torch_profiler(gemm: GroupedGemm, dtype: str) -> Profiler:
    import torch

    from scout_core.evidence.kernel_profile import TorchProfiler
    from scout_core.lab.expert_workload import torch_experts

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ScoutError(f"--dtype {dtype!r} is no dtype of torch; use float32, bfloat16, ...")
    workload = torch_experts(gemm, kind, torch.device(_device()))
    return TorchProfiler(workload, gemm.num_sms)


def _kernel(library: str, settings: str, dtype: str) -> dict[str, str]:
    from scout_core.evidence.environment import kernel_version

    version = kernel_version(library)
    assert version is not None
    return {
        "kernel_library": library,
        "kernel_version": version,
        "kernel_settings": settings,
        "dtype": dtype,
    }


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
