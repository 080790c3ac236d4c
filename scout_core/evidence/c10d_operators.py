"""The `c10d::*` operators of this torch: their common words, and where their arguments are.

Positions come from the operators' own schemas, so that an operator of a later torch is at least
seen with its group. What must be equal on all members is stated here, per operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from scout_core.evidence.ring import COLLECTIVE, RECEIVE, SEND

Arguments = tuple[Any, ...]


class Spec(NamedTuple):
    """How to read the arguments of one operator; a position is -1 when there is no such one."""

    word: str
    """The same for every caller: "all_reduce", "send", ..."""
    kind: int
    """COLLECTIVE, SEND or RECEIVE."""
    group: int
    reduce: int
    root: int
    peer: int
    tag: int
    sized: Callable[[Arguments], Any]
    """The tensor or list of tensors whose dtype, and mostly size, is equal on all members."""
    equal_size: Callable[[Arguments], bool]
    """Whether the size must be equal in this call."""
    completes: bool
    """Whether the `Work` on the CPU ever says that it is complete."""


def operators() -> dict[str, Spec]:
    """Return every `c10d` operator that communicates, by its name without namespace."""
    # Private API of torch, checked with 2.13.0.
    names = torch._C._dispatch_get_all_op_names()
    found = {}
    for name in sorted(n.removeprefix("c10d::") for n in names if n.startswith("c10d::")):
        spec = _spec(name)
        if spec.group >= 0:
            found[name] = spec
    return found


def _spec(name: str) -> Spec:
    schema = getattr(torch.ops.c10d, name).default._schema
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    word, sized, equal_size = _WORDS.get(name, (name.strip("_"), _nothing, _never))
    return Spec(
        word=word,
        kind=_KINDS.get(name, COLLECTIVE),
        group=places.get("process_group", -1),
        reduce=places.get("reduce_op", -1),
        root=places.get("root_rank", -1),
        peer=places.get("dst", places.get("src", -1)),
        tag=places.get("tag", -1),
        sized=sized,
        equal_size=equal_size,
        # The Work of gloo's reduce-scatter never says so, not even after wait() (2.13.0).
        completes="reduce_scatter" not in name,
    )


def _nothing(args: Arguments) -> Any:
    return ()


def _first(args: Arguments) -> Any:
    return args[0]


def _second(args: Arguments) -> Any:
    return args[1]


def _first_list(args: Arguments) -> Any:
    return args[0][0]


def _second_list(args: Arguments) -> Any:
    return args[1][0]


def _always(args: Arguments) -> bool:
    return True


def _never(args: Arguments) -> bool:
    return False


def _without_splits(args: Arguments) -> bool:
    return not args[3] and not args[4]


# Uneven lists are still equal as lists: every member passes the sizes of all of them. The split
# sizes of an all-to-all are each rank's own, so its size is compared only when there are none.
_WORDS: Final[dict[str, tuple[str, Callable[..., Any], Callable[..., bool]]]] = {
    "allreduce_": ("all_reduce", _first, _always),
    "allreduce_coalesced_": ("all_reduce_coalesced", _first, _always),
    "broadcast_": ("broadcast", _first, _always),
    "reduce_": ("reduce", _first, _always),
    "allgather_": ("all_gather", _first_list, _always),
    "_allgather_base_": ("all_gather_into_tensor", _second, _always),
    "allgather_coalesced_": ("all_gather_coalesced", _second, _always),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", _second, _always),
    "reduce_scatter_": ("reduce_scatter", _second_list, _always),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", _first, _always),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", _first, _always),
    "gather_": ("gather", _second, _always),
    "scatter_": ("scatter", _first, _always),
    "alltoall_": ("all_to_all", _first, _never),
    "alltoall_base_": ("all_to_all_single", _first, _without_splits),
    "barrier": ("barrier", _first, _never),
    "monitored_barrier_": ("monitored_barrier", _first, _never),
    "send": ("send", _first, _always),
    "recv_": ("recv", _first, _always),
    "recv_any_source_": ("recv", _first, _always),
}
_KINDS: Final = {"send": SEND, "recv_": RECEIVE, "recv_any_source_": RECEIVE}
