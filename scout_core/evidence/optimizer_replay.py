"""Replay of one optimizer update on a bounded slice.

Every peer runs the real update code on a copy of one peer's (parameter, gradient, state, hyper-
parameters) slice. Only element-wise optimizers qualify: their update of a slice is the slice of
their update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scout_core.evidence.capture import Arguments, Undo, local_of, take_apart, tensors_of

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
)
"""Stock optimizers whose update is element by element, with fused and foreach forms included."""


class OptimizerRecorder:
    """Copies one slice just before the next `optimizer.step()`, once.

    It stays installed until it is closed: torch iterates over the live table of hooks, which must
    not change meanwhile.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, round_: int, max_elements: int) -> None:
        """Arm the recorder.

        Args:
            round_: picks parameter and offset; equal on all peers.
            max_elements: largest number of elements of the slice.
        """
        self.arguments: Arguments | None = None
        self.error: Exception | None = None
        self._seen = False
        self._optimizer = optimizer
        self._round = round_
        self._max_elements = max_elements
        handle = optimizer.register_step_pre_hook(lambda *_: self._on_step())
        self._undo: Undo | None = handle.remove

    def close(self) -> None:
        """Remove the recorder from the optimizer."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _on_step(self) -> None:
        if self._seen:
            return
        self._seen = True
        try:
            self.arguments = slice_of(self._optimizer, self._round, self._max_elements)
        except Exception as error:  # noqa: BLE001 -- guard: a hook of SCOUT never raises
            self.error = error


def slice_of(optimizer: torch.optim.Optimizer, round_: int, max_elements: int) -> Arguments | None:
    """Copy parameter, gradient, state and hyper-parameters of one slice; None without gradients."""
    having = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if not having:
        return None
    turn, index = divmod(round_, len(having))
    group, parameter = having[index]
    size = local_of(parameter).numel()
    start = (turn * max_elements) % max(size, 1)
    part = slice(start, min(start + max_elements, size))
    state = {
        key: _cut(value, part, size) for key, value in optimizer.state.get(parameter, {}).items()
    }
    hyper = {key: value for key, value in group.items() if key != "params"}
    call = {
        "parameter": _cut(parameter.detach(), part, size),
        "grad": _cut(parameter.grad, part, size),
        "state": state,
        "hyper": hyper,
    }
    return take_apart((call,), {})


def updated(optimizer: torch.optim.Optimizer, call: dict[str, Any]) -> Sequence[torch.Tensor]:
    """Run the optimizer's own step on the copies and return parameter and state after it.

    No hook of the optimizer and no global optimizer hook runs: the step function is called below
    the wrapper that runs them.
    """
    parameter = nn.Parameter(call["parameter"])
    parameter.grad = call["grad"]
    twin = object.__new__(type(optimizer))  # copy.copy would drop what a fused kernel needs
    vars(twin).update(vars(optimizer))
    twin.param_groups = [{**call["hyper"], "params": [parameter]}]
    twin.state = defaultdict(dict, {parameter: call["state"]} if call["state"] else {})
    _bare_step(type(optimizer))(twin)
    return [parameter.detach(), *tensors_of(dict(twin.state[parameter]))]


def _bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    step: Callable[[Any], Any] = getattr(kind.step, "__wrapped__", kind.step)
    return step


def _cut(value: Any, part: slice, size: int) -> Any:
    """Take the slice of a tensor that has one entry per element; leave anything else whole."""
    if not isinstance(value, torch.Tensor):
        return value
    local = local_of(value.detach())
    return local.reshape(-1)[part] if local.numel() == size and local.dim() > 0 else local
