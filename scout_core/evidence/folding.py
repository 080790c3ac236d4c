"""Sign tensors where they live, and fold many signatures into one."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from scout_core.decision.evidence import Signature
from scout_core.evidence.capture import local_of
from scout_core.evidence.signature import algorithm_of, signatures


def signature_of(tensors: Mapping[Any, torch.Tensor | None]) -> Signature:
    """Fold the local parts of named tensors, in order, into one signature.

    A name whose tensor is None counts too: "no gradient" differs from any gradient. Only 8 bytes
    per tensor leave the device, with one synchronisation.
    """
    named = [(str(name), tensor) for name, tensor in tensors.items()]
    present = [local_of(tensor.detach()) for _, tensor in named if tensor is not None]
    label = ",".join(f"{name}{'' if tensor is not None else '-'}" for name, tensor in named)
    algorithms = sorted({algorithm_of(tensor) for tensor in present})
    digest = xxhash.xxh3_64(label.encode())
    for value in signatures(present):
        digest.update(struct.pack("<Q", value))
    return Signature(digest.intdigest(), "+".join(algorithms) or "xxh3")
