"""Names of collectives: every source spells them differently, the verdict needs one word each."""

from __future__ import annotations

import re

# (letters of a raw name start with, the one word); the first match counts.
_WORDS = (
    ("allreducebarrier", "barrier"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("reducescatter", "reduce_scatter"),
    ("monitoredbarrier", "barrier"),
    ("barrier", "barrier"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
)

_FULL_DEPENDENCY = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
_HOST_BACKENDS = frozenset({"", "gloo", "mpi"})


def one_word(raw: str) -> str:
    """Return the common name of an operation.

    "nccl:_all_gather_base", "_ALLGATHER_BASE" and "allgather_into_tensor_coalesced_" all become
    "all_gather"; a name that is not known is returned in lower case without its backend.
    """
    name = raw.rpartition(":")[2].strip().lower()
    letters = re.sub("[^a-z]", "", name)
    return next((word for start, word in _WORDS if letters.startswith(start)), name)


def needs_every_member(name: str) -> bool:
    """Tell whether no member can complete the operation before all members have joined it.

    Not so for rooted operations (the root of a broadcast may run ahead), for all-to-all (a pair
    may have nothing to exchange) and for send and receive (small messages are buffered).
    """
    return name in _FULL_DEPENDENCY


def on_device(backend: str) -> bool:
    """Tell whether a back-end queues its operations on a device, behind the CPU's back."""
    return backend not in _HOST_BACKENDS
