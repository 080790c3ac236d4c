"""Signatures at the edges of a replayed module's submodules, forward and backward, in order.

Taken only after a replay was suspicious, for `decision.origin`. The module is isolated while it is
traced, so the hooks that are added here are gone with its private hook tables.

# Note [Edges]

A tensor- or expert-parallel submodule is called as args -> conversion -> in -> forward -> out ->
conversion -> result. Conversions communicate, so "in" and "result" may hold values of another rank;
the gradients pass the other way, so those at "out" and "args" may. Without a conversion there are
only "in" and "out", and all of it is the rank's own work. A submodule that communicates inside of
its forward makes its partners wrong at the same edge; what each put into the collective ("sent")
comes before that edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from scout_core.decision.origin import Event, Trace
from scout_core.decision.topology import LayoutName
from scout_core.evidence.capture import tensors_of
from scout_core.evidence.folding import signature_of


class _Edge(NamedTuple):
    place: str
    computed: bool  # the value is this rank's own work
    grad_computed: bool  # its gradient is
    layout: LayoutName


class Tracer:
    """Records the events of one forward and backward pass of an isolated module."""

    def __init__(
        self, module: nn.Module, layout: LayoutName = "dense", apart: tuple[str, ...] = ()
    ) -> None:
        """Add hooks to all submodules that run eagerly.

        Args:
            layout: whose peers run the module.
            apart: prefixes of parameter names; a submodule that owns such parameters computes
                values of its own, equal among expert peers only.
        """
        self._events: list[Event] = []
        self._layout = layout
        for name, child in _eager_submodules(module, ""):
            self._watch(name, child, "expert" if f"{name}.".startswith(apart) else layout)

    @property
    def trace(self) -> Trace:
        """Events so far."""
        return tuple(self._events)

    def output(self, tensors: list[torch.Tensor]) -> None:
        """Record the output of the module itself."""
        self._pass(_Edge("out", True, True, self._layout), tensors)

    def sent(self, tensors: list[torch.Tensor]) -> None:
        """Record what this rank puts into a collective: it is its own, right or wrong."""
        self._add("sent", True, self._layout, tensors)

    def _watch(self, name: str, child: nn.Module, inside: LayoutName) -> None:
        """Record what passes the edges of a submodule; see Note [Edges]."""
        converts_in, converts_out = bool(child._forward_pre_hooks), bool(child._forward_hooks)
        outside = self._layout
        if converts_in:
            self._before(child, _Edge(f"{name} args", True, False, outside), first=True)
        self._before(child, _Edge(f"{name} in", not converts_in, True, inside), first=False)
        self._after(child, _Edge(f"{name} out", True, not converts_out, inside), first=True)
        if converts_out:
            self._after(child, _Edge(f"{name} result", False, True, outside), first=False)

    def _before(self, child: nn.Module, edge: _Edge, first: bool) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._pass(edge, tensors_of((args, kwargs)))

        child.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)

    def _after(self, child: nn.Module, edge: _Edge, first: bool) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self._pass(edge, tensors_of(out))

        child.register_forward_hook(hook, prepend=first)

    def _pass(self, edge: _Edge, tensors: list[torch.Tensor]) -> None:
        """Sign the values now and their gradients when the backward pass comes by."""
        self._add(edge.place, edge.computed, edge.layout, tensors)

        def add_gradient(grad: torch.Tensor) -> None:
            self._add(f"{edge.place} grad", edge.grad_computed, edge.layout, [grad])

        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(add_gradient)  # type: ignore[no-untyped-call]

    def _add(
        self, place: str, computed: bool, layout: LayoutName, tensors: list[torch.Tensor]
    ) -> None:
        value = signature_of(dict(enumerate(tensors))).value
        self._events.append(Event(place, computed, layout, value))


def _eager_submodules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield all submodules but those inside a compiled one, whose hooks are not called."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        yield inner, child
        yield from _eager_submodules(child, inner)
