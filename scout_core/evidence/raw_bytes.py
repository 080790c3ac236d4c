"""The raw bytes of a tensor of any layout, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # torch 2.13
from torch.distributed.tensor import DTensor

from scout_core.errors import ScoutError

# Copies run on integers of the element's size: exact for NaN payloads and for bool bytes that are
# neither 0 nor 1, and defined for dtypes that have no arithmetic.
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def readable(tensor: Tensor) -> Tensor:
    """Return the plain strided tensor that holds the bytes: of a DTensor, its local shard.

    Raises:
        ScoutError: quantised, sparse, nested, meta and wrapper tensors, and tensors whose storage
            was freed (as FSDP does), have no raw bytes of their own; the message names the layout.
    """
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        layout = _unreadable_layout(local)
        if layout:
            raise ScoutError(
                f"a {layout} tensor of {local.dtype} has no raw bytes to sign; "
                "sign the plain tensors behind it, or leave it out"
            )
        return local.detach().as_subclass(Tensor)


def pieces(tensor: Tensor, limit_bytes: int) -> Iterator[Tensor]:
    """Yield the elements' bytes in row-major order as 1-D uint8 tensors.

    Contiguous memory is yielded as it lies, whatever its size. Anything else (strides, expanded
    axes, lazy conjugation or negation) is copied in pieces of at most `limit_bytes`.

    Args:
        tensor: a result of `readable`.
        limit_bytes: at least the size of one element.
    """
    lazy = tensor.is_conj() or tensor.is_neg()
    if not lazy and tensor.is_contiguous():
        yield _flat_bytes(tensor)
    elif tensor.nbytes <= limit_bytes:
        solid = _as_integers(tensor.resolve_conj().resolve_neg() if lazy else tensor)
        yield _flat_bytes(solid.contiguous())
    else:
        per_piece = limit_bytes // tensor[0].nbytes
        for part in torch.split(tensor, per_piece) if per_piece else tensor.unbind():
            yield from pieces(part, limit_bytes)


def _flat_bytes(contiguous: Tensor) -> Tensor:
    """View contiguous memory as bytes; an axis of size 1 may have any stride, so none is kept."""
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _as_integers(tensor: Tensor) -> Tensor:
    pairs = torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor
    return pairs.view(_INTEGER_OF_SIZE[pairs.itemsize])


def _unreadable_layout(tensor: Tensor) -> str:
    """Name what keeps the bytes from being read; empty when they can be.

    Quantised tensors come first: viewing one as uint8 crashes the process in torch 2.13.
    """
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return "sparse" if "sparse" in str(tensor.layout) else str(tensor.layout)
    if tensor.is_meta:
        return "meta"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return type(tensor).__name__
    if _end_byte(tensor) > tensor.untyped_storage().nbytes():
        return "freed"
    return ""


def _end_byte(tensor: Tensor) -> int:
    """Offset in the storage just behind the last element; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * tensor.itemsize
