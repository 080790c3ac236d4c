"""Watch that state at rest does not change between two optimizer steps, without any peer.

A shard with a single owner is gathered alike by all peers, so no vote sees it
corrupted. But between the end of one update and the start of the next nothing may write it. The
watch signs it at both ends of the sampled step; that is one step out of every interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scout_core.decision.evidence import Signature

Sign = Callable[[], Mapping[str, Signature]]


class RestWatch:
    """Compares the state units of one rank at the two ends of a step."""

    def __init__(self, sign: Sign) -> None:
        """Prepare; `sign` returns one signature per state unit, as it is now."""
        self._sign = sign
        self._before: Mapping[str, Signature] | None = None
        self._changed: tuple[str, ...] = ()

    def remember(self) -> None:
        """Sign the state after an update; forget what was seen before."""
        self._changed = ()
        self._before = self._sign()

    def look(self) -> None:
        """Sign the state just before the next update; later calls in the same step do nothing."""
        before, self._before = self._before, None
        if before is not None:
            after = self._sign()
            self._changed = tuple(n for n, value in before.items() if after.get(n) != value)

    @property
    def changed(self) -> tuple[str, ...]:
        """Units that changed while nothing may write them, in order."""
        return self._changed
