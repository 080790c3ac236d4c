"""Make the real torchtitan 0.2.2 run on CPU with gloo; test side only, imported before torchtitan.

Nothing of torchtitan is edited: what the CPU build of torch lacks is put where torchtitan looks for
it. On a machine with an accelerator none of this is needed, and none of it is installed.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_MEMORY_BYTES = 16 << 30
_KERNELS = "torchtitan.models.moe.kernels"


def install() -> None:
    """Install everything once; a second call changes nothing."""
    if torch.accelerator.is_available() or hasattr(torch.cpu, "memory_stats"):
        return
    _name_the_device()
    _drop_device_ids_of_barrier()
    _load_moe_kernels()
    _count_integers()
    _sum_gradients_without_factor()
    _ring_attention()


def _name_the_device() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = types.SimpleNamespace(total_memory=_MEMORY_BYTES, name="cpu")
    missing: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: properties,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, function in missing.items():
        setattr(torch.cpu, name, function)


def _drop_device_ids_of_barrier() -> None:
    """gloo's barrier takes no device ids."""
    original = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: original(group, async_op)


def _load_moe_kernels() -> None:
    """`import torchtitan` runs one file that needs triton: load it with a stand-in, then drop that.

    torch must not come to believe that triton is there. The reference kernel for CPU, which is in
    the same file, takes the place of the triton one.
    """
    found = importlib.util.find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        return
    path = pathlib.Path(found.submodule_search_locations[0]) / "models" / "moe" / "kernels.py"
    spec = importlib.util.spec_from_file_location(_KERNELS, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_in, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    stand_in.jit = lambda function: function  # type: ignore[attr-defined]
    stand_in.language = language  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    sys.modules |= {"triton": stand_in, "triton.language": language}
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]
    sys.modules[_KERNELS] = module
    reference = module.fill_indices_cpu
    module.fill_indices_wrapper = lambda *args, **kwargs: reference(*args[:6])


def _count_integers() -> None:
    """The router counts tokens by `torch.histc`, which has no integer form on CPU."""
    original = torch.histc

    def histc(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts = original(values.double(), *args, **kwargs)
        return counts.to(values.dtype)

    torch.histc = histc


def _sum_gradients_without_factor() -> None:
    """A division factor makes FSDP2 use PREMUL_SUM, which gloo lacks; sum, then divide instead."""
    original = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def _ring_attention() -> None:
    """Context parallelism knows CUDA's attention operators only: add the CPU's."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    sequence_dim = 2

    def call_forward(
        operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        query, key, value, *rest = args
        local = [each.to_local() for each in (query, key, value)]
        dropout, causal = (*rest, *(0.0, False)[len(rest) :])
        out, logsumexp, *_ = ring._templated_ring_attention(
            query.device_mesh.get_group(),
            sequence_dim,
            forward,
            query=local[0],
            key=local[1],
            value=local[2],
            is_causal=causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return _as_like(query, out, logsumexp)

    def call_backward(
        operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        query = args[1]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in args]
        grads = ring._templated_ring_attention_backward(
            query.device_mesh.get_group(),
            sequence_dim,
            backward.default,
            grad_out=local[0],
            grad_out_name="grad_out",
            query=local[1],
            key=local[2],
            value=local[3],
            out=local[4],
            logsumexp=local[5],
            is_causal=local[7],
            dropout_p=local[6],
            scale=kwargs.get("scale"),
        )
        return _as_like(query, *grads[:3])

    ring.custom_ops[forward.default] = call_forward
    ring.custom_ops[backward.default] = call_backward


def _as_like(like: DTensor, *tensors: torch.Tensor) -> tuple[DTensor, ...]:
    return tuple(
        DTensor.from_local(each, like.device_mesh, like.placements, run_check=False)
        for each in tensors
    )
