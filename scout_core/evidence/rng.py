"""Save, ship and restore the state of the random generators that a module draws from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

RngState = dict[str, torch.Tensor]
"""Generator name ("cpu", "device") -> state, as byte tensors on the CPU."""


def get_rng(device: torch.device) -> RngState:
    """Copy the state of the CPU generator and, for an accelerator, of its default generator."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_rng(state: RngState, device: torch.device) -> None:
    """Put a state back that `get_rng` copied."""
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Leave all generators as they were, whatever is drawn inside."""
    state = get_rng(device)
    try:
        yield
    finally:
        set_rng(state, device)
