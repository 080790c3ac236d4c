"""Run the real code of a live module without touching training.

# Note [Isolated module]

Replay calls the live module object itself, because compiled code, closures and fused kernels are
bound to it. For the time of the call every submodule gets a private copy of its `__dict__` with

- its parameters replaced by fresh leaves that alias the same (materialised) memory, so that no
  gradient hook, reducer or `.grad` of training can be reached;
- its buffers replaced by clones, so that a forward that updates them updates the clones;
- its hooks emptied, so that no DDP, FSDP or user hook runs. Children keep the hooks of DTensor
  tensor parallelism, which convert layouts and are part of the layer's work; the top module is
  called after those hooks already ran on the captured arguments.

On leaving, each `__dict__` is put back as it was: whatever the forward assigned to its module is
gone too. Attributes that are containers are shared with training, not copied: a layer that appends
to a list in its forward is visible in training (docs/limits.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_HOOK_DICTS = tuple(
    name
    for name, value in nn.Module().__dict__.items()
    if "hook" in name and isinstance(value, dict)
)

Materialised = dict[nn.Parameter, torch.Tensor]
"""Live parameter -> whole tensor to compute with; a parameter left out is used as it is."""

LeafMaker = Callable[[nn.Parameter, torch.Tensor], nn.Parameter]


def plain_leaf(live: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
    """Make a fresh leaf that aliases `whole` and carries the live parameter's attributes."""
    leaf = nn.Parameter(whole.detach(), requires_grad=live.requires_grad)
    attributes = {k: v for k, v in vars(live).items() if k not in ("grad", "main_grad")}
    vars(leaf).update(attributes)
    return leaf


@contextlib.contextmanager
def isolated(
    module: nn.Module, whole: Materialised, make_leaf: LeafMaker = plain_leaf
) -> Iterator[dict[str, nn.Parameter]]:
    """Give the module private leaves, buffers and hook tables, and put everything back after.

    Yields:
        The fresh leaves by qualified name, tied parameters once (under their first name).
    """
    saved = {child: dict(vars(child)) for child in module.modules()}
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    for live in module.parameters():
        leaves[live] = make_leaf(live, whole.get(live, live))
    buffers = {buffer: buffer.detach().clone() for buffer in module.buffers()}
    names = {name: leaves[live] for name, live in module.named_parameters()}
    try:
        for child, state in saved.items():
            vars(child).update(_private(state, leaves, buffers, keep_layout=child is not module))
        yield names
    finally:
        for child, state in saved.items():
            vars(child).clear()
            vars(child).update(state)


def _private(
    state: dict[str, Any],
    leaves: dict[nn.Parameter, nn.Parameter],
    buffers: dict[torch.Tensor, torch.Tensor],
    keep_layout: bool,
) -> dict[str, Any]:
    layout_hooks = {
        key
        for name in _HOOK_DICTS
        for key, hook in state[name].items()
        if keep_layout and _is_layout_hook(hook)
    }
    changed: dict[str, Any] = {
        "_parameters": {k: p if p is None else leaves[p] for k, p in state["_parameters"].items()},
        "_buffers": {k: b if b is None else buffers[b] for k, b in state["_buffers"].items()},
    }
    for name in _HOOK_DICTS:
        hooks = state[name]  # some of these tables hold flags of a hook, under the hook's key
        changed[name] = type(hooks)((k, v) for k, v in hooks.items() if k in layout_hooks)
    return changed


def _is_layout_hook(hook: Any) -> bool:
    """Recognise the input/output conversions that DTensor tensor parallelism registers."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.tensor")
