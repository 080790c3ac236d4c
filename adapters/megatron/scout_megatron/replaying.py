"""What must hold while a module of Megatron is replayed, besides what isolates any module.

# Note [Replaying Megatron modules]

- Recomputation inside a layer re-enters autograd, which a backward pass for chosen inputs refuses;
  its switches are off during a replay. The result is the same, bit by bit: recomputing is a matter
  of memory.
- Fused weight-gradient kernels add into `weight.main_grad` and return a stand-in. A leaf has a
  scratch buffer of its own there, so training's is never reached, and the replay reads it back.
- A token dispatcher is no module and keeps what it saw last; the log of auxiliary losses is global
  and summed up. Both are put back as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from torch import nn

from scout_core.evidence.isolate import plain_leaf

RECOMPUTE_SWITCHES = (
    "activation_recompute",
    "checkpoint_core_attention",
    "moe_layer_recompute",
    "recompute_input_layernorm",
    "recompute_mlp",
    "recompute_pre_mlp_layernorm",
    "recompute_up_proj",
    "shared_experts_recompute",
)
"""Attributes of modules inside a layer, megatron-core 0.16.1 - 0.18.2."""


@contextlib.contextmanager
def prepared(module: nn.Module) -> Iterator[None]:
    """Keep a replay of the module away from everything that outlives it."""
    with contextlib.ExitStack() as stack:
        for child in module.modules():
            _switch_off(child, stack)
            dispatcher = vars(child).get("token_dispatcher")
            if dispatcher is not None:
                stack.enter_context(_kept(vars(dispatcher)))
        stack.enter_context(_kept(auxiliary_losses(), emptied=True))
        yield


def leaf_of(live: nn.Parameter, whole: torch.Tensor, fused: bool) -> nn.Parameter:
    """Make a leaf; with fused weight gradients it has a scratch buffer for them."""
    leaf: Any = plain_leaf(live, whole)
    accumulated = vars(live).get("main_grad")
    if fused and accumulated is not None:
        leaf.main_grad = torch.zeros_like(accumulated)
        leaf.grad_added_to_main_grad = False
    return leaf  # type: ignore[no-any-return]


def gradient_of(leaf: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return what the backward pass computed, and clear the scratch buffer for the next one."""
    scratch: torch.Tensor | None = vars(leaf).get("main_grad")
    if scratch is None or not leaf.grad_added_to_main_grad:
        return gradient
    computed = scratch.clone()
    scratch.zero_()
    leaf.grad_added_to_main_grad = False
    return computed


def _switch_off(child: nn.Module, stack: contextlib.ExitStack) -> None:
    attributes = vars(child)
    switches = [name for name in RECOMPUTE_SWITCHES if attributes.get(name) is True]
    if attributes.get("gradient_accumulation_fusion") and getattr(child, "weight", 0) is None:
        switches.append("gradient_accumulation_fusion")  # its weight comes as an argument
    for name in switches:
        attributes[name] = False
        stack.callback(attributes.__setitem__, name, True)


@contextlib.contextmanager
def _kept(entries: MutableMapping[str, Any], emptied: bool = False) -> Iterator[None]:
    """Put all entries back on leaving."""
    before = dict(entries)
    if emptied:
        entries.clear()
    try:
        yield
    finally:
        entries.clear()
        entries.update(before)


def auxiliary_losses() -> MutableMapping[str, Any]:
    """The log of auxiliary losses; an object of its own from megatron-core 0.18 on."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        return moe_utils.get_moe_layer_wise_logging_tracker()  # type: ignore[no-any-return]
    return get_moe_metrics_tracker().metrics  # type: ignore[no-any-return]
