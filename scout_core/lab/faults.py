"""Faults on purpose: described as data, applied by one helper that every framework's tests use.

A fault imitates broken hardware: it acts wherever the faulty rank does that kind of work, in
training and in replay alike. Nothing in the product knows of it: modules, optimizers and the
session's framework and exchange are wrapped from outside, and unwrapped again.
"""

from __future__ import annotations

import contextlib
import enum
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo, local_of, tensors_of


class Surface(enum.StrEnum):
    """Where a silent corruption acts."""

    PARAMETER = "parameter"  # a bit of a weight flips at rest, once
    OUTPUT = "output"  # forward output of a layer
    GRADIENT = "gradient"  # gradient that enters a layer's backward pass
    OPTIMIZER = "optimizer"  # result of the optimizer's update
    GATHER = "gather"  # parameters as they arrive in an all-gather
    BROADCAST = "broadcast"  # replay inputs as they arrive


class Magnitude(enum.StrEnum):
    """Which bit of the victim element flips."""

    LOW_BIT = "low_bit"  # least significant mantissa bit: near-invisible
    MID_BIT = "mid_bit"  # a bit in the middle of the mantissa
    EXPONENT = "exponent"
    SIGN = "sign"
    NAN = "nan"  # all exponent bits and the top mantissa bit are set


class Persistence(enum.StrEnum):
    """How often the fault acts after its step."""

    PERSISTENT = "persistent"  # every time
    INTERMITTENT = "intermittent"  # with a probability
    ONE_SHOT = "one_shot"  # once


@dataclass(frozen=True)
class FaultAt:
    """One fault: who, from which optimizer step on, what and how strongly."""

    kind: str
    """"sdc", "gradient", "straggler" or "hang"."""
    rank: int
    step: int
    """First optimizer step (from 0) whose forward pass it acts in."""
    layer: int = 0
    """Index into the hidden layers."""
    surface: Surface = Surface.OUTPUT
    magnitude: Magnitude = Magnitude.MID_BIT
    persistence: Persistence = Persistence.PERSISTENT
    probability: float = 0.5
    """Of acting, when intermittent."""
    percent: float = 50.0
    """Extra time of a straggler."""
    seed: int = 0
    """Picks the element and, when intermittent, the calls."""


KINDS = ("sdc", "gradient", "straggler", "hang")


def parse_fault(text: str) -> tuple[str, dict[str, Any]]:
    """Read "KIND[:name=value,...]", as in `sdc:rank=2,layer=1,surface=output`.

    Returns:
        The kind and the fields that were given; the caller draws the others.

    Raises:
        ScoutError: an unknown kind, name or value.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ScoutError(f"--fault {text!r}: kind {kind!r} must be one of {', '.join(KINDS)}")
    parts = [part.partition("=") for part in rest.split(",") if part]
    return kind, {name: _field(text, name, value) for name, _, value in parts}


def _field(text: str, name: str, value: str) -> Any:
    kinds: dict[str, Callable[[str], Any]] = {
        "rank": int,
        "step": int,
        "layer": int,
        "surface": Surface,
        "magnitude": Magnitude,
        "persistence": Persistence,
        "probability": float,
        "percent": float,
        "seed": int,
    }
    if name not in kinds:
        raise ScoutError(f"--fault {text!r}: unknown name {name!r}; use {', '.join(kinds)}")
    try:
        return kinds[name](value)
    except ValueError as error:
        raise ScoutError(f"--fault {text!r}: {name}={value!r}: {error}") from None


@dataclass(frozen=True)
class Target:
    """What a fault can act on, on one rank."""

    layers: list[nn.Module]
    optimizer: torch.optim.Optimizer
    framework: Any = None
    """The session's Framework, for gather faults."""
    exchange: Any = None
    """The session's Exchange, for broadcast faults."""


def inject(fault: FaultAt, target: Target) -> Undo:
    """Apply the fault on this rank, from now on; call it at the start of its step.

    Returns:
        What takes the fault away again. A flipped parameter is flipped back only if nothing has
        written it since; the caller restores state it wants restored.

    Raises:
        ScoutError: the layer does not exist.
    """
    if not 0 <= fault.layer < len(target.layers):
        raise ScoutError(
            f"fault layer={fault.layer}: the model has layers 0..{len(target.layers) - 1}"
        )
    layer = target.layers[fault.layer]
    if fault.kind == "straggler":
        undos = [_slow(each, fault.percent / 100.0) for each in target.layers]
        return lambda: _all(undos)
    if fault.kind == "hang":
        return _wrap_forward(layer, _stand_still)
    surface = Surface.GRADIENT if fault.kind == "gradient" else fault.surface
    corrupt = Corruption(fault)
    if surface is Surface.PARAMETER:
        Corruption(replace(fault, persistence=Persistence.PERSISTENT))(_largest_parameter(layer))
        return lambda: None
    if surface is Surface.OPTIMIZER:
        return _wrap_optimizer(target.optimizer, corrupt)
    if surface is Surface.GATHER:
        return _wrap_gather(target.framework, layer, corrupt)
    if surface is Surface.BROADCAST:
        return _wrap_broadcast(target.exchange, corrupt)
    function = _CorruptOutput if surface is Surface.OUTPUT else _CorruptGradient
    return _wrap_forward(layer, lambda out: _map_first(out, _through(function, corrupt)))


def _all(undos: list[Undo]) -> None:
    for undo in undos:
        undo()


class Corruption:
    """Flips one bit of one element of a tensor, in place, when the fault acts."""

    def __init__(self, fault: FaultAt) -> None:
        self._fault = fault
        self._random = random.Random(fault.seed)
        self._place = self._random.random()
        self._acted = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Corrupt the local part of a floating-point tensor."""
        local = local_of(tensor.detach())
        if not local.numel() or not self._acts():
            return
        self._acted += 1
        flat = local.view(-1) if local.is_contiguous() else local.reshape(-1)
        index = int(self._place * flat.numel())
        element = flat[index : index + 1].clone()
        flip_bit(element, self._fault.magnitude)
        with torch.no_grad():
            local[tuple(torch.unravel_index(torch.tensor(index), local.shape))] = element[0]

    def _acts(self) -> bool:
        if self._fault.persistence is Persistence.ONE_SHOT:
            return self._acted == 0
        if self._fault.persistence is Persistence.INTERMITTENT:
            return self._random.random() < self._fault.probability
        return True


_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(element: torch.Tensor, magnitude: Magnitude) -> None:
    """Change one bit of a one-element floating-point tensor in place (NAN sets several)."""
    mantissa = _MANTISSA[element.dtype]
    bits = element.element_size() * 8
    raw = element.view(_INTEGER[element.element_size()])
    if magnitude is Magnitude.NAN:
        raw |= ((1 << (bits - 1 - mantissa)) - 1 << mantissa) | (1 << (mantissa - 1))
        return
    position = {
        Magnitude.LOW_BIT: 0,
        Magnitude.MID_BIT: mantissa // 2,
        Magnitude.EXPONENT: mantissa + 1,
        Magnitude.SIGN: bits - 1,
    }[magnitude]
    one = torch.tensor(1, dtype=torch.int64) << position
    raw ^= one.to(raw.dtype)


class _CorruptOutput(torch.autograd.Function):
    """Identity whose result is corrupted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, corrupt: Corruption) -> torch.Tensor:
        result = tensor.clone()
        corrupt(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _CorruptGradient(torch.autograd.Function):
    """Identity whose gradient is corrupted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, corrupt: Corruption) -> torch.Tensor:
        ctx.corrupt = corrupt
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result = grads[0].clone()
        ctx.corrupt(result)
        return result, None


class _Stopwatch(torch.autograd.Function):
    """Identity that calls `passed` when the backward pass comes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passed: Callable[[], None]) -> torch.Tensor:
        ctx.passed = passed
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.passed()
        return grads[0], None


def _through(
    function: type[torch.autograd.Function], argument: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    apply: Callable[[torch.Tensor, Any], torch.Tensor] = function.apply
    return lambda tensor: apply(tensor, argument)


def _slow(module: nn.Module, fraction: float) -> Undo:
    """Make forward and backward of a module burn a fraction of their own CPU time on top."""
    original = module.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        started = 0.0

        def backward_starts() -> None:
            nonlocal started
            started = time.thread_time()

        def backward_ends() -> None:
            if started:
                burn((time.thread_time() - started) * fraction)

        begin = time.thread_time()
        args = _map_first(args, _through(_Stopwatch, backward_ends))
        out = original(*args, **kwargs)
        burn((time.thread_time() - begin) * fraction)
        return _map_first(out, _through(_Stopwatch, backward_starts))

    return _replace_forward(module, slow)


def burn(seconds: float) -> None:
    """Use up CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _stand_still(out: Any) -> Any:
    while True:
        time.sleep(3600.0)


def _wrap_forward(module: nn.Module, change: Callable[[Any], Any]) -> Undo:
    original = module.forward
    return _replace_forward(module, lambda *args, **kwargs: change(original(*args, **kwargs)))


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    had = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if had is None:
            vars(module).pop("forward", None)
        else:
            module.forward = had

    return undo


def _map_first(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply to the first floating-point tensor of a tensor or a tuple; DTensors at their local."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            if any(t.is_floating_point() for t in tensors_of(part)):
                return (*value[:i], _map_first(part, change), *value[i + 1 :])
        return value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if isinstance(value, DTensor):
        local = change(value.to_local())
        return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False)
    return change(value)


def _wrap_optimizer(optimizer: torch.optim.Optimizer, corrupt: Corruption) -> Undo:
    """Give the optimizer a subclass whose update corrupts its largest parameter with state."""
    kind = type(optimizer)
    bare = getattr(kind.step, "__wrapped__", kind.step)

    class Faulty(kind):  # type: ignore[misc, valid-type]
        def step(self, *args: Any, **kwargs: Any) -> Any:
            result = bare(self, *args, **kwargs)
            touched = [
                p for group in self.param_groups for p in group["params"] if p.grad is not None
            ]
            if touched:
                corrupt(max(touched, key=lambda p: local_of(p.detach()).numel()))
            return result

    Faulty.__name__ = kind.__name__
    optimizer.__class__ = Faulty
    optimizer._patch_step_function()

    def undo() -> None:
        optimizer.__class__ = kind

    return undo


def _wrap_gather(framework: Any, layer: nn.Module, corrupt: Corruption) -> Undo:
    original = framework.whole

    @contextlib.contextmanager
    def whole(module: nn.Module) -> Any:
        with original(module) as materialised:
            if module is layer:
                live = _largest_parameter(module)
                bad = materialised.get(live, live).detach().clone()
                corrupt(bad)
                yield {**materialised, live: bad}
            else:
                yield materialised

    framework.whole = whole
    return lambda: delattr(framework, "whole")


def _wrap_broadcast(exchange: Any, corrupt: Corruption) -> Undo:
    original = exchange.broadcast

    def broadcast(tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None:
        original(tensor, source, ranks)
        if tensor.is_floating_point() and tensor.dim() > 0:
            corrupt(tensor)

    exchange.broadcast = broadcast
    return lambda: delattr(exchange, "broadcast")


def _largest_parameter(module: nn.Module) -> nn.Parameter:
    return max(module.parameters(), key=lambda p: local_of(p.detach()).numel())
