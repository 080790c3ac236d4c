"""How an agent reaches a trainer of its node: by process id and anonymous descriptors.

# Note [No names]
Rings are anonymous memory files and messages go through anonymous pipes. The agent opens both as
/proc/PID/fd/N, which the kernel allows to the same user only. Nothing has a name in a file system,
so nothing is left behind by a process that is killed, and no other user can reach it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scout_core.errors import ScoutError


@dataclass(frozen=True)
class Contact:
    """What a trainer tells its node's agent."""

    rank: int
    """Global rank."""
    pid: int
    ring: int
    """Descriptor of its progress ring."""
    requests: int
    """Descriptor of the pipe that it reads."""
    replies: int
    """Descriptor of the pipe that it writes."""
    training_thread: int
    """Native id of the thread that trains."""
    training_ident: int
    """Its Python ident, by which stack dumps name it."""
    helper_thread: int
    """Native id of the thread that reads requests."""
    dump_signal: int = 0
    """Signal that makes the helper thread dump all stacks without the GIL; 0: none."""
    internal: tuple[str, ...] = ()
    """Prefixes of source paths that are not the user's."""
    device: str = ""
    trace_socket: str = ""
    """Where torch serves its Flight Recorder; empty while SCOUT sees the operations itself."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Contact:
        """Read what `to_json` wrote.

        Raises:
            ScoutError: a field is missing or unknown.
        """
        try:
            return cls(**{**plain, "internal": tuple(plain.get("internal", ()))})
        except TypeError as error:
            raise ScoutError(
                f"contact of a trainer cannot be read ({error}); "
                "all ranks of a job must run the same version of SCOUT"
            ) from None
