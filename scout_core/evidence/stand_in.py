"""Finite values to compute with when training has been poisoned by NaN or infinity.

Once a NaN has reached the weights, every rank computes NaN from then on and all agree. The hardware
can still be tested: the same code runs on the same device, on values that all peers draw alike.
"""

from __future__ import annotations

import torch

from scout_core.evidence.capture import local_of


def stand_in(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a tensor like `tensor` with values in [0, 0.1) from the seed; integers are kept.

    Drawn on the CPU, so that all kinds of devices get the same values. They are not negative,
    because optimizer state may be the argument of a square root.
    """
    if not tensor.dtype.is_floating_point:
        return tensor.clone()
    generator = torch.Generator().manual_seed(seed)
    twin = torch.empty_like(tensor).detach()
    local = local_of(twin)
    values = torch.rand(local.shape, generator=generator) * 0.1
    with torch.no_grad():
        local.copy_(values.to(local.dtype))
    return twin
