"""In-situ replay of one captured call (Algorithm 2, lines 6-9 and the signatures of 10-11).

The votes around it, and what the gathered evidence means, are in `integration.check` and
`decision.replay_verdict`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scout_core.decision.evidence import Signature
from scout_core.decision.origin import Trace
from scout_core.decision.topology import LayoutName
from scout_core.evidence.capture import Arguments, Modes, local_of, tensors_of
from scout_core.evidence.clock import Clock, Timing
from scout_core.evidence.folding import signature_of
from scout_core.evidence.isolate import LeafMaker, Materialised, isolated
from scout_core.evidence.rng import RngState
from scout_core.evidence.sent import Sent
from scout_core.evidence.stand_in import stand_in
from scout_core.evidence.trace import Tracer

Whole = Callable[[nn.Module], contextlib.AbstractContextManager[Materialised]]
GradientOf = Callable[[nn.Parameter, torch.Tensor | None], torch.Tensor | None]


@dataclass(frozen=True)
class Inputs:
    """What all peers compute on: the source's arguments and random state."""

    arguments: Arguments
    tensors: Sequence[torch.Tensor]
    """In the order of `arguments.tensors`; received from the source."""
    constants: Sequence[Any]
    needs_grad: Sequence[bool]
    rng: RngState
    modes: Modes
    poisoned: bool = False
    """Training computes NaN: parameters are replaced by finite stand-ins."""


@dataclass
class Replayed:
    """Evidence of this rank's replays of one call."""

    theta: Signature | None = None
    """Of the materialised parameters; None for a module without parameters."""
    outputs: list[dict[str, Signature]] = field(default_factory=list)
    """Per signed repeat: signatures of "output", "input_grad" and "parameter_grad"."""
    gather: Timing | None = None
    """Time to make the parameters whole."""
    calls: list[Timing] = field(default_factory=list)
    """Time of forward and backward, per repeat."""
    finite: bool = True
    """False when an output or gradient holds a NaN or an infinity."""


@dataclass(frozen=True)
class Device:
    """How the replay reaches the framework: parameters, leaves, generators, clock."""

    whole: Whole
    make_leaf: LeafMaker
    get_rng: Callable[[], RngState]
    set_rng: Callable[[RngState], None]
    clock: Clock
    device: torch.device
    gradient_of: GradientOf = lambda leaf, gradient: gradient


def replay(
    module: nn.Module,
    inputs: Inputs,
    device: Device,
    repeats: int,
    apart: tuple[str, ...] = (),
) -> Replayed:
    """Materialise the parameters, then run the real module forward and backward on copies.

    Args:
        module: live module; it is left exactly as it was (see Note [Isolated module]).
        repeats: >= 2; the fastest is the time, the first and the last are signed.
        apart: prefixes of parameter names whose values and gradients are computed, not signed.

    The output's own value is the gradient that enters the backward pass: all peers have it and it
    needs no second broadcast.
    """
    found = Replayed()
    with _prepared(module, inputs, device, found) as leaves:
        shared = {name: leaf for name, leaf in leaves.items() if not name.startswith(apart)}
        if shared:
            found.theta = signature_of(shared)
        for repeat in range(repeats):
            call = _call(module, inputs, device, leaves)
            found.calls.append(_timed(call, inputs.modes, device))
            if repeat in (0, repeats - 1):
                found.outputs.append(call.signatures(shared))
                found.finite = found.finite and call.is_finite()
    return found


def trace(
    module: nn.Module, inputs: Inputs, device: Device, layout: LayoutName, apart: tuple[str, ...]
) -> Trace:
    """Run the module as `replay` does, once, and sign what passes between its submodules."""
    with _prepared(module, inputs, device, Replayed()) as leaves:
        tracer = Tracer(module, layout, apart)
        call = _call(module, inputs, device, leaves, tracer.output)
        with Sent(tracer.sent):
            _timed(call, inputs.modes, device)
        return tracer.trace


@contextlib.contextmanager
def _prepared(
    module: nn.Module, inputs: Inputs, device: Device, found: Replayed
) -> Iterator[dict[str, nn.Parameter]]:
    """Make the parameters whole and isolate the module; random generators are put back after."""
    before = device.get_rng()
    with contextlib.ExitStack() as stack:
        entered: list[Materialised] = []
        found.gather = device.clock.measure(
            lambda: entered.append(stack.enter_context(device.whole(module)))
        )
        make_leaf = _poisoned(device.make_leaf) if inputs.poisoned else device.make_leaf
        leaves = stack.enter_context(isolated(module, entered[0], make_leaf))
        stack.callback(device.set_rng, before)
        yield leaves


def _poisoned(make_leaf: LeafMaker) -> LeafMaker:
    seeds = itertools.count()
    return lambda live, whole: make_leaf(live, stand_in(whole, next(seeds)))


def _call(
    module: nn.Module,
    inputs: Inputs,
    device: Device,
    leaves: Mapping[str, nn.Parameter],
    watch: Callable[[list[torch.Tensor]], None] | None = None,
) -> _Call:
    """Set up one call on fresh copies of the inputs, with the source's random state."""
    copies = [
        tensor.clone().requires_grad_(needs)
        for tensor, needs in zip(inputs.tensors, inputs.needs_grad, strict=True)
    ]
    args, kwargs = inputs.arguments.rebuild(copies, inputs.constants)
    device.set_rng(inputs.rng)
    trainable = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return _Call(module, args, kwargs, [t for t in copies if t.requires_grad], trainable, watch)


def _timed(call: _Call, modes: Modes, device: Device) -> Timing:
    enabled, dtype = modes.autocast
    kind = device.device.type
    with (
        torch.enable_grad(),
        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False),
    ):
        timing = device.clock.measure(call.run)
    call.collect(device.gradient_of)
    return timing


class _Call:
    """Forward and backward of one repeat; keeps the results for signing after the clock."""

    def __init__(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        leaves: Mapping[str, nn.Parameter],
        watch: Callable[[list[torch.Tensor]], None] | None,
    ) -> None:
        self._entry = module._compiled_call_impl or module.forward
        self._args, self._kwargs = args, kwargs
        self._inputs, self._leaves = inputs, leaves
        self._watch = watch
        self._outputs: list[torch.Tensor] = []
        self._grads: list[torch.Tensor | None] = []

    def run(self) -> None:
        self._outputs = tensors_of(self._entry(*self._args, **self._kwargs))
        if self._watch is not None:
            self._watch(self._outputs)
        roots = [y for y in self._outputs if y.requires_grad]
        wanted = [*self._inputs, *self._leaves.values()]
        if roots and wanted:
            seeds = [y.detach() for y in roots]
            self._grads = list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
        else:
            self._grads = [None] * len(wanted)

    def collect(self, gradient_of: GradientOf) -> None:
        """Take the leaves' gradients from where fused kernels have put them."""
        split = len(self._inputs)
        pairs = zip(self._leaves.values(), self._grads[split:], strict=True)
        self._grads[split:] = [gradient_of(leaf, gradient) for leaf, gradient in pairs]

    def signatures(self, shared: Mapping[str, nn.Parameter]) -> dict[str, Signature]:
        """Sign the results; of parameter gradients only those of `shared`."""
        split = len(self._inputs)
        grads = dict(zip(self._leaves, self._grads[split:], strict=True))
        return {
            "output": signature_of(dict(enumerate(self._outputs))),
            "input_grad": signature_of(dict(enumerate(self._grads[:split]))),
            "parameter_grad": signature_of({n: g for n, g in grads.items() if n in shared}),
        }

    def is_finite(self) -> bool:
        return all(map(is_finite, (*self._outputs, *self._grads)))


def is_finite(tensor: torch.Tensor | None) -> bool:
    """Tell whether a tensor holds neither NaN nor infinity; None is finite."""
    if tensor is None:
        return True
    local = local_of(tensor)
    if local.dtype.itemsize == 1:
        local = local.float()  # fp8 has no isfinite
    return bool(torch.isfinite(local).all())
