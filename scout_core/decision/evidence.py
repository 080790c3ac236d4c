"""Evidence: the small values that ranks exchange, and their form on the wire.

Big tensors never travel: a `Signature` (64 bit) stands for them. Values of different types are not
comparable, so every kind of evidence has a type of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NamedTuple, get_type_hints

from scout_core.errors import ScoutError


class Progress(NamedTuple):
    """How far a rank got: published before every operation that may block."""

    step: int  # optimizer step, from 0
    operation: int  # counts boundaries inside the step, from 0


class Fingerprint(NamedTuple):
    """What a pending collective is; equal fingerprints mean "entered the same operation"."""

    group: str  # name of the process group
    sequence: int  # number of the collective in its group, from 0
    operation: str
    arguments: str  # dtype, shapes, reduce operation, root: everything that must be equal


class Signature(NamedTuple):
    """64-bit hash of a tensor's dtype, shape and raw bytes."""

    value: int  # unsigned
    algorithm: str  # "xxh3", "scout64", or both joined by "+" where a value covers several tensors;
    # values of different algorithms cannot be compared


class Duration(NamedTuple):
    """Time for one controlled unit of work."""

    seconds: float


class Missing(NamedTuple):
    """A rank that could not give evidence says so instead of staying away."""

    reason: str


Evidence = Progress | Fingerprint | Signature | Duration | Missing

_KINDS: tuple[Callable[..., Evidence], ...] = (Progress, Fingerprint, Signature, Duration, Missing)
_TYPES = {kind.__name__: (kind, tuple(get_type_hints(kind).values())) for kind in _KINDS}


def kind_of(value: object) -> str:
    """Name what a value can be compared with: equal kinds compare, different kinds do not."""
    if isinstance(value, Signature):
        return f"Signature/{value.algorithm}"
    return type(value).__name__


def to_wire(values: dict[str, Evidence]) -> bytes:
    """Encode named evidence as JSON; integers keep all 64 bits, nan and inf survive."""
    plain = {name: [type(value).__name__, *value] for name, value in values.items()}
    return json.dumps(plain, separators=(",", ":")).encode()


def from_wire(data: bytes) -> dict[str, Evidence]:
    """Decode what `to_wire` wrote.

    Raises:
        ScoutError: not JSON of that form; nothing is guessed, no field changes its type, and no
            class is looked up by name outside the five of this module.
    """
    try:
        plain = json.loads(data)
        return {name: _decoded(kind, fields) for name, (kind, *fields) in plain.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ScoutError(
            f"evidence of {len(data)} bytes from a peer cannot be read ({error}); "
            "all ranks must run the same version of SCOUT"
        ) from error


def _decoded(name: str, fields: list[object]) -> Evidence:
    kind, types = _TYPES[name]
    for value, expected in zip(fields, types, strict=True):
        if type(value) is not expected and (type(value), expected) != (int, float):
            raise TypeError(f"{value!r} in {name} is no {expected.__name__}")
    return kind(*fields)


def is_healthy_duration(seconds: float) -> bool:
    """Tell whether a measured time can be healthy at all: finite and not negative."""
    return math.isfinite(seconds) and seconds >= 0.0
