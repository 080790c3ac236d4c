"""Job-wide agreement: every rank tells its part and hears all others, or nobody moves.

One exchange is one round. Ranks that heard the same take the same decision, without a coordinator.
"""

from __future__ import annotations

import json
from typing import Any

from scout_core.evidence.exchange import Exchange

Part = dict[str, Any]


class Agreement:
    """Rounds over all ranks of a job. After the first failure every round fails at once."""

    def __init__(self, exchange: Exchange) -> None:
        """Use the exchange's own groups and its deadline."""
        self._exchange = exchange
        self._everyone = tuple(range(exchange.world_size))
        self.broken = ""
        """Why no round can succeed any more; empty while they can."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._exchange.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return len(self._everyone)

    def round(self, subject: Part, mine: Part) -> list[Part] | None:
        """Tell all ranks this rank's part and return theirs, in rank order.

        Args:
            subject: what the round is about; must be equal on all ranks.
            mine: JSON values.

        Returns:
            None when a rank did not come before the exchange's deadline, or came with another
            subject: then nothing may be promoted, now or later.
        """
        if self.broken:
            return None
        payload = json.dumps([subject, mine]).encode()
        try:
            told = self._exchange.all_gather(payload, self._everyone)
        except (RuntimeError, TimeoutError) as error:  # gloo's and the local exchange's deadline
            self.broken = f"a rank did not come to the round about {subject}: {error}"[:500]
            return None
        parts = [json.loads(part) for part in told]
        subjects = [part[0] for part in parts]
        odd = [rank for rank, each in enumerate(subjects) if each != subjects[0]]
        if odd:
            self.broken = (
                f"ranks {odd} spoke of {subjects[odd[0]]} while rank 0 spoke of {subjects[0]}"
            )
            return None
        return [part[1] for part in parts]
