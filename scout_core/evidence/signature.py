"""64-bit signatures: a tensor's dtype, shape and raw bytes, folded where the tensor lives.

CPU tensors are hashed with xxh3; accelerator tensors with SCOUT64, on the device, so that only
8 bytes leave it. The two never compare: the algorithm is part of the evidence.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from scout_core.decision.evidence import Missing, Signature
from scout_core.errors import ScoutError
from scout_core.evidence import scout64 as device_hash
from scout_core.evidence.raw_bytes import pieces, readable

XXH3: Final = "xxh3"
SCOUT64: Final = "scout64"

_CPU_PIECE_BYTES = 1 << 20  # copied at once of a tensor that is not contiguous
_MAX_DEPTH = 64
_MAX_VALUES = 100_000

# Tensor.numpy() would mark the storage as not resizable, and FSDP resizes it at every unshard.
_PyBUF_READ = 0x100
_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def algorithm_of(tensor: Tensor) -> str:
    """Name the algorithm that signs this tensor: "xxh3" on CPU, "scout64" elsewhere."""
    return XXH3 if tensor.device.type == "cpu" else SCOUT64


def signature(tensor: Tensor) -> int:
    """Return the 64-bit unsigned signature of dtype, shape and raw bytes; waits for the device.

    Strides, storage and requires_grad do not matter; a DTensor stands for its local shard. Scratch
    memory is bounded (see `scout64.digest`).

    Raises:
        ScoutError: the tensor has no raw bytes: quantised, sparse, nested, meta, wrapper, freed.
    """
    return signatures([tensor])[0]


def signatures(tensors: Sequence[Tensor]) -> list[int]:
    """Sign many tensors and wait once per device, after all work has been queued.

    Raises:
        ScoutError: a tensor has no raw bytes (see `signature`).
    """
    plain = [readable(tensor) for tensor in tensors]
    queued: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
    for position, tensor in enumerate(plain):
        if algorithm_of(tensor) == SCOUT64:
            queued[tensor.device].append((position, device_hash.digest(tensor)))
    hashed = {i: _xxh3(tensor) for i, tensor in enumerate(plain) if algorithm_of(tensor) == XXH3}
    for entries in queued.values():
        values = torch.stack([value for _, value in entries]).tolist()
        hashed |= {position: value for (position, _), value in zip(entries, values, strict=True)}
    return [_with_header(hashed[i], tensor) for i, tensor in enumerate(plain)]


def scout64(tensor: Tensor) -> int:
    """Sign with SCOUT64 on any device: the CPU's result is the reference for the others.

    Raises:
        ScoutError: the tensor has no raw bytes (see `signature`).
    """
    plain = readable(tensor)
    return _with_header(int(device_hash.digest(plain)), plain)


def evidence(tensor: Tensor) -> Signature:
    """Return the signature with its algorithm, as ranks exchange it.

    Raises:
        ScoutError: the tensor has no raw bytes (see `signature`).
    """
    return Signature(signature(tensor), algorithm_of(tensor))


def signature_tree(obj: object) -> Signature | Missing:
    """Sign nested inputs: tensors, numbers, strings, enums and the usual containers around them.

    The order of dict and set entries does not matter; types do (1, 1.0 and True differ), and of a
    torch.device only its type counts, since peers run on different ones. Containers may contain
    themselves. A value of any other type makes the whole tree `Missing`, which compares with
    nothing. The algorithm names those of all tensors inside, "xxh3" if there is none.
    """
    walk = _Walk()
    try:
        walk.add(obj)
    except ScoutError as error:
        return Missing(str(error))
    signed = [value.to_bytes(8, "little") for value in signatures(walk.tensors)]
    whole = b"".join(signed[part] if isinstance(part, int) else part for part in walk.parts)
    names = sorted({algorithm_of(tensor) for tensor in walk.tensors}) or [XXH3]
    return Signature(xxhash.xxh3_64_intdigest(whole), "+".join(names))


def _xxh3(tensor: Tensor) -> int:
    state = xxhash.xxh3_64()
    if tensor.numel():
        for piece in pieces(tensor, _CPU_PIECE_BYTES):
            state.update(_view_of_memory(piece.data_ptr(), piece.nbytes, _PyBUF_READ))
    return state.intdigest()


def _with_header(digest: int, tensor: Tensor) -> int:
    """Mix dtype and shape in; for tensors that agree in both this is a bijection."""
    mixed = digest & device_hash.MASK_64 ^ _header(tensor.dtype, tensor.shape)
    for factor in (device_hash.FMIX_1, device_hash.FMIX_2, 1):
        mixed = (mixed ^ (mixed >> 33)) * factor & device_hash.MASK_64
    return mixed


@functools.lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: torch.Size) -> int:
    text = f"{dtype}{tuple(shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _Walk:
    """One pass over nested inputs, into bytes that decode in one way only.

    Tensors are collected, to be signed together; `parts` holds their positions in their places.
    """

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []
        self.tensors: list[Tensor] = []
        self._open: list[int] = []  # ids of the containers around the current value
        self._values = 0

    def add(self, value: object) -> None:
        """Append one value and what it holds.

        Raises:
            ScoutError: something in it cannot be compared.
        """
        self._values += 1
        if self._values > _MAX_VALUES or len(self._open) > _MAX_DEPTH:
            raise ScoutError(
                f"inputs of over {_MAX_VALUES} values or {_MAX_DEPTH} levels cannot be compared"
            )
        if isinstance(value, Tensor):
            self.tensors.append(readable(value))
            self.parts += [b"tensor:", len(self.tensors) - 1]
            return
        self._append(_type_name(value))
        if id(value) in self._open:
            self._append(f"cycle {self._open.index(id(value))}")
            return
        plain = _plain_bytes(value)
        if plain is not None:
            self._append(plain)
            return
        self._open.append(id(value))
        self._add_container(value)
        self._open.pop()

    def _add_container(self, value: object) -> None:
        if isinstance(value, dict):
            self._add_fields((self._key(k), v) for k, v in dict.items(value))
        elif isinstance(value, list | tuple):
            of_base = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
            elements = list(of_base)  # a subclass may iterate otherwise
            self._append(str(len(elements)))
            for element in elements:
                self.add(element)
        elif isinstance(value, set | frozenset):
            self._add_fields((self._key(element), None) for element in value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._add_fields(
                (field.name.encode(), getattr(value, field.name, Missing("not set")))
                for field in dataclasses.fields(value)
            )
        else:
            raise ScoutError(f"inputs of type {_type_name(value)} cannot be compared")

    def _add_fields(self, fields: Iterable[tuple[bytes, object]]) -> None:
        ordered = sorted(fields, key=lambda field: field[0])
        self._append(str(len(ordered)))
        for name, value in ordered:
            self._append(name)
            self.add(value)

    def _key(self, key: object) -> bytes:
        walk = _Walk()
        walk._open = list(self._open)
        walk.add(key)
        if walk.tensors:
            raise ScoutError("inputs with tensors as keys of a dict or in a set have no order")
        return b"".join(part for part in walk.parts if isinstance(part, bytes))

    def _append(self, text: str | bytes) -> None:
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        self.parts.append(b"%d:%b" % (len(data), data))


def _plain_bytes(value: Any) -> bytes | None:
    """Encode a value that holds no other; None if it is not one."""
    match value:
        case None:
            return b""
        case enum.Enum():
            return str(value.value if value.name is None else value.name).encode()
        case int():
            return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        case float():
            return struct.pack("<d", value)
        case complex():
            return struct.pack("<dd", value.real, value.imag)
        case str():
            return value.encode(errors="surrogatepass")
        case bytes() | bytearray():
            return bytes(value)
        case torch.device():
            return value.type.encode()
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value).encode()
    return None


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
