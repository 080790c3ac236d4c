"""How the calls of an expert stage carry rows per expert: what an adapter tells of its experts.

An expert stage is what one rank computes between the dispatch of tokens and their combination.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from scout_core.decision.expert_replay import Rows
from scout_core.evidence.capture import Arguments, take_apart
from scout_core.evidence.row_log import Counts, rows_of
from scout_core.evidence.stand_in import stand_in

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments."""


@dataclass(frozen=True)
class ExpertKernels:
    """What a catalogue is bound to besides the machine: who computes a stage, and what.

    The texts are those of `decision.environment.Environment`.
    """

    library: str
    version: str
    settings: str
    dtype: str
    in_features: int
    out_features: int
    num_experts: int
    """Local experts of the stage."""
    grouped: bool = False
    """One kernel computes all local experts; otherwise each has launches of its own."""
    row_alignment: int = 1
    """Rows of each expert are padded to multiples of this."""


class ExpertCalls(Protocol):
    """Reads the row counts of a call, and makes the same call for other row counts."""

    @property
    def kernels(self) -> ExpertKernels:
        """Who computes the stage."""

    @property
    def rows_vary(self) -> bool:
        """False when every call has the same rows, so that any sampled call speaks for all."""

    def counts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Counts, int]:
        """Return rows per local expert without waiting for a device, and a bound of their sum."""

    def resized(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Rows) -> Call:
        """Return the call with these rows per local expert, filled from this one's rows.

        The same on every rank that has the same call. Tensors keep `requires_grad`.
        """


class PackedCalls:
    """Experts called with (tokens, counts, ...), the tokens expert by expert.

    tokens: (at least sum of counts, width); rows beyond the sum are padding. counts: (local
    experts,), a tensor or a list. Further arguments named in `per_row` have one entry per token.
    """

    rows_vary = True

    def __init__(
        self, module: nn.Module, kernels: ExpertKernels, per_row: Sequence[str] = ()
    ) -> None:
        """Read the names of the first two parameters from the module's class."""
        self.kernels = kernels
        self._signature = inspect.signature(type(module).forward.__get__(module))
        self._tokens, self._counts = list(self._signature.parameters)[:2]
        self._per_row = (self._tokens, *per_row)

    def counts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Counts, int]:
        given = self._signature.bind(*args, **kwargs).arguments
        return given[self._counts], len(given[self._tokens])

    def resized(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Rows) -> Call:
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        old = given[self._counts]
        index = source_rows(rows_of(old), rows)
        for name in self._per_row:
            given[name] = filled(given[name], index, sum(rows))
        given[self._counts] = (
            torch.tensor(rows, dtype=old.dtype, device=old.device)
            if isinstance(old, torch.Tensor)
            else type(old)(rows)
        )
        return bound.args, bound.kwargs


def source_rows(old: Rows, new: Rows) -> list[int]:
    """Return the row of the old call that fills each row of the new one; empty without old rows.

    Each expert's rows are repeated or cut; an expert that had none takes the whole call's rows.
    """
    total, start = sum(old), 0
    index: list[int] = []
    for had, wants in zip(old, new, strict=True):
        first, length = (start, had) if had else (0, total)
        index += [first + i % length for i in range(wants)] if length else []
        start += had
    return index


def filled(tensor: torch.Tensor, index: Sequence[int], num_rows: int, dim: int = 0) -> torch.Tensor:
    """Return the chosen rows of a tensor, or as many stand-in rows when none is chosen."""
    if index or not num_rows:
        place = torch.tensor(index, dtype=torch.int64, device=tensor.device)
        made = tensor.detach().index_select(dim, place)
    else:
        shape = list(tensor.shape)
        shape[dim] = num_rows
        made = stand_in(tensor.detach().new_empty(shape), seed=num_rows)
    return made.requires_grad_(tensor.requires_grad)


def resized(calls: ExpertCalls, arguments: Arguments, rows: Rows) -> Arguments:
    """Return captured arguments with other rows per local expert."""
    args, kwargs = calls.resized(*_call_of(arguments), rows)
    return take_apart(args, kwargs)


def captured_rows(calls: ExpertCalls, arguments: Arguments) -> Rows:
    """Return the rows per local expert of captured arguments; may wait for the device."""
    return rows_of(calls.counts(*_call_of(arguments))[0])


def _call_of(arguments: Arguments) -> Call:
    tensors = [
        tensor.detach().requires_grad_(needs)
        for tensor, needs in zip(arguments.tensors, arguments.needs_grad, strict=True)
    ]
    args, kwargs = arguments.rebuild(tensors, arguments.constants)
    return tuple(args), kwargs


CallsOf = Callable[[nn.Module], ExpertCalls]
