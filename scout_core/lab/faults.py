"""Faults on purpose, described as data; `lab.injection` applies them."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scout_core.errors import ScoutError
from scout_core.evidence.capture import local_of


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
    """One of `KINDS`."""
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
    """Extra compute time of a straggler, a group slow-down or an uneven stage."""
    delay_s: float = 0.06
    """Extra time of a slow collective, length of a pause, or time that data is waited for."""
    rows: int | None = None
    """Acts only where one expert computes that many rows, in all layers."""
    seed: int = 0
    """Picks the element and, when intermittent, the calls."""


KINDS = {
    "sdc": "a rank computes or holds wrong values",
    "gradient": "a rank computes wrong gradients",
    "straggler": "a rank computes slowly",
    "slow_nic": "all groups that leave the rank's host are slow",
    "slow_link": "the tensor-parallel (else shard) group of the rank is slow",
    "slow_machine": "every group of the rank is slow",
    "contention": "every group of the job is slow",
    "group_slowdown": "all ranks compute slowly",
    "rotating_pauses": "changing ranks pause for garbage collection",
    "stage_imbalance": "the rank's pipeline stage has more work than the others",
    "sequence_imbalance": "each rank gets sequences of another length in each step",
    "slow_loading": "all ranks wait for data before each step",
    "hang": "a rank stands still in a layer until somebody reports it",
}
"""What each kind of fault does."""


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
        "delay_s": float,
        "rows": int,
        "seed": int,
    }
    if name not in kinds:
        raise ScoutError(f"--fault {text!r}: unknown name {name!r}; use {', '.join(kinds)}")
    try:
        return kinds[name](value)
    except ValueError as error:
        raise ScoutError(f"--fault {text!r}: {name}={value!r}: {error}") from None


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
