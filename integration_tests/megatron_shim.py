"""Make the real Megatron run on CPU with gloo; test side only, installed before its import.

Nothing of Megatron is edited: the entry points of torch.cuda that it calls without asking are put
on the CPU, and what gloo lacks is made of what it has. On a machine with a GPU nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)
_KERNELS = "fused_weight_gradient_mlp_cuda"  # of Apex: adds a weight gradient to where it belongs
_installed = False


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def install() -> None:
    """Install everything once; a second call changes nothing."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    importlib.import_module("torch._dynamo")  # lists torch's functions, and asks for triton
    _name_the_device()
    _put_tensors_on_the_cpu()
    _order_nothing()
    _share_one_generator()
    _speak_gloo()
    _gather_unequal_parts()
    if not hasattr(typing, "override"):  # 0.18 is meant for Python 3.12
        typing.override = typing_extensions.override
    sys.modules[_KERNELS] = _weight_gradient_kernels()
    sys.meta_path.insert(0, _Finder())


def _set(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _name_the_device() -> None:
    properties = types.SimpleNamespace(
        multi_processor_count=1, name="cpu", total_memory=1 << 34, major=8, minor=0
    )
    _set(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        set_device=_nothing,
        device_count=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        get_device_capability=lambda *_: (8, 0),
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: properties,
        memory_stats=lambda *_: {},
        mem_get_info=lambda *_: (1 << 34, 1 << 34),
        reset_peak_memory_stats=_nothing,
    )
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch.cuda.max_memory_reserved = lambda *_: 0


def _is_cuda(place: Any) -> bool:
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return isinstance(place, str) and place.partition(":")[0] == "cuda"


def _put_tensors_on_the_cpu() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in ("FloatTensor", "IntTensor", "LongTensor", "ByteTensor", "HalfTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    torch.cuda.DoubleTensor = torch.DoubleTensor
    move, kind = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = ["cpu" if _is_cuda(arg) else arg for arg in args]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return move(self, *places, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        """Optimizers sort parameters by the text 'torch.cuda.FloatTensor'."""
        if dtype is None:
            return kind(self).replace("torch.", "torch.cuda.", 1)
        plain = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
        return kind(self, plain, **kwargs)

    same: Callable[..., Any] = lambda self, *args, **kwargs: self  # noqa: E731
    _set(torch.Tensor, to=to, type=type_, cuda=same, pin_memory=same, record_stream=_nothing)
    torch.nn.Module.cuda = same  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _Stream:
    """Everything is in order already."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wait_stream = self.wait_event = self.synchronize = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wait = self.synchronize = _nothing
        self.at_s = 0.0

    def record(self, *args: Any) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.at_s - self.at_s) * 1e3


def _order_nothing() -> None:
    stream = _Stream()
    _set(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        stream=lambda *_: contextlib.nullcontext(),
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        synchronize=_nothing,
        empty_cache=_nothing,
        ipc_collect=_nothing,
        _lazy_call=lambda call, **_: call(),
        _lazy_init=_nothing,
    )
    _set(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, mark=_nothing)


class _Generators(tuple[torch.Generator, ...]):
    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def _share_one_generator() -> None:
    """The CPU's generator stands in for every GPU's."""

    def get(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    _set(torch.cuda, get_rng_state=get, set_rng_state=put, manual_seed=seed, manual_seed_all=seed)
    _set(torch.cuda.random, get_rng_state=get, set_rng_state=put)
    torch.cuda.default_generators = _Generators((torch.default_generator,))


def _speak_gloo() -> None:
    """Replace nccl by gloo, and drop what only nccl understands."""
    init, new, barrier, exchange = (
        dist.init_process_group,
        dist.new_group,
        dist.barrier,
        dist.all_to_all_single,
    )

    def plain(kwargs: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in kwargs.items() if k not in ("pg_options", "device_id")}
        if "nccl" in str(kept.get("backend", "")):
            kept["backend"] = "gloo"
        return kept

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init(*(("gloo", *args[1:]) if args else ()), **plain(kwargs))

    @functools.wraps(new)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **plain(kwargs))

    def listed(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    def all_to_all_single(
        output: Any,
        tensor: Any,
        outs: Any = None,
        ins: Any = None,
        group: Any = None,
        **kwargs: Any,
    ) -> Any:
        outs = listed(kwargs.pop("output_split_sizes", outs))
        ins = listed(kwargs.pop("input_split_sizes", ins))
        return exchange(output, tensor, outs, ins, group=group, **kwargs)

    _set(
        dist,
        init_process_group=init_process_group,
        new_group=new_group,
        barrier=lambda group=None, async_op=False, device_ids=None: barrier(group, async_op),
        all_to_all_single=all_to_all_single,
    )


def _gather_unequal_parts() -> None:
    """gloo wants parts of one size; experts with tensor parallelism send what they have."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(
        parts: Any, mine: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [part.shape[0] if part.dim() else 1 for part in parts]
        if len(set(rows)) == 1:
            return gather(parts, mine, group=group, async_op=async_op)
        padded = mine.new_zeros((max(rows), *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        wide = [torch.empty_like(padded) for _ in parts]
        gather(wide, padded, group=group)
        for part, full, count in zip(parts, wide, rows, strict=True):
            part.copy_(full[:count])
        return None

    def reduce_scatter(
        out: torch.Tensor, parts: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kw: Any
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(out, parts, op=op, group=group, **kw)
        for index, part in enumerate(parts):
            total = part.contiguous()
            dist.all_reduce(total, op=op, group=group)
            if index == dist.get_rank(group):
                out.copy_(total)
        return None

    _set(dist, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _weight_gradient_kernels() -> types.ModuleType:
    def accumulate(given: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        total += grad.t() @ given

    module = types.ModuleType(_KERNELS)
    _set(module, wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    return module


class _Anything(types.ModuleType):
    """Has every attribute, and leaves what it decorates as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


@contextlib.contextmanager
def _stand_in_for_triton() -> Iterator[None]:
    """Let a file define its kernels on a machine without triton; they are never called.

    The stand-in is gone afterwards, so that torch does not come to believe in it.
    """
    stubs = {name: _Anything(name) for name in ("triton", "triton.language")}
    sys.modules |= stubs
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the few modules of Megatron that need a hand."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTERWARDS and name not in _NEEDS_TRITON:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        stand_in = _stand_in_for_triton() if module.__name__ in _NEEDS_TRITON else None
        with stand_in or contextlib.nullcontext():
            self._loader.exec_module(module)
        _AFTERWARDS.get(module.__name__, _nothing)(module)


def _allow_no_cuda(module: Any) -> None:
    module.initialize_megatron = functools.partial(module.initialize_megatron, allow_no_cuda=True)


def _name_missing_gemm(module: Any) -> None:
    """0.16.1 without Transformer Engine leaves one name undefined."""
    module.te_general_gemm = getattr(module, "te_general_gemm", None)


_NEEDS_TRITON = ("megatron.core.transformer.moe.paged_stash",) if not _has_triton() else ()
_AFTERWARDS: dict[str, Callable[[Any], None]] = {
    "megatron.core.transformer.moe.moe_utils": _name_missing_gemm,
    "megatron.core.datasets.utils": lambda module: _set(module, compile_helpers=_nothing),
    "megatron.training.initialize": _allow_no_cuda,
}
