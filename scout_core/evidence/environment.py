"""Read the environment that a catalogue is bound to from the machine it runs on."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import torch

from scout_core.errors import ScoutError

OWN_KERNEL = "scout grouped GEMM"  # lab.grouped_gemm_kernel and its model
TORCH_KERNEL = "torch matmul per expert"  # lab.expert_workload
TORCH_SETTINGS = "one launch per expert"
TORCH_GROUPED_KERNEL = "torch._grouped_mm"

_CPU_INFO = pathlib.Path("/proc/cpuinfo")
_DRIVERS = (pathlib.Path("/proc/driver/nvidia/version"), pathlib.Path("/sys/module/amdgpu/version"))


def machine() -> dict[str, Any]:
    """Return the fields of `decision.environment.Environment` that the machine decides.

    What is absent is said in words, because two empty fields would compare as equal. On a CPU there
    are no multiprocessors: the cores stand for them.

    Raises:
        ScoutError: there is a GPU whose driver does not tell its version.
    """
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = torch.cuda.nccl.version() if nccl else ()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, version)) or "no NCCL",
    }
    if not torch.cuda.is_available():
        cuda = torch.version.cuda or "no CUDA"
        cores = os.cpu_count() or 1
        return found | {"gpu": _cpu(), "num_sms": cores, "driver": "no GPU driver", "cuda": cuda}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found | {
        "gpu": device.name,
        "num_sms": device.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip or "no CUDA",
    }


def _driver() -> str:
    for path in _DRIVERS:
        if path.exists():
            return path.read_text().splitlines()[0].strip()
    raise ScoutError(
        f"the version of the GPU driver cannot be read from {' or '.join(map(str, _DRIVERS))}; "
        "give it with --environment, because a catalogue is bound to it"
    )


def _cpu() -> str:
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"no GPU, {models[0] if models else platform.machine()}"


def kernel_version(library: str) -> str | None:
    """Return the installed version of a kernel library, or None for one not known here."""
    if library == OWN_KERNEL:
        triton = _version("triton")
        return f"scout {_version('scout-training')}, {f'triton {triton}' if triton else 'model'}"
    of_torch = library in (TORCH_KERNEL, TORCH_GROUPED_KERNEL)
    return f"torch {torch.__version__}" if of_torch else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
