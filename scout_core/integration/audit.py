"""State at rest, as one check sees it: replicated state by signature, owned state by coherence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from scout_core.decision.evidence import Signature
from scout_core.decision.replay_verdict import Report
from scout_core.decision.topology import LayoutName
from scout_core.evidence.coherence import CoherenceWatch
from scout_core.evidence.folding import signature_of
from scout_core.evidence.rest import RestWatch
from scout_core.integration.framework import StateUnit


class Audit:
    """What this rank adds to its report about its own memory."""

    def __init__(
        self,
        state_units: Callable[[], Sequence[StateUnit]],
        watch: CoherenceWatch,
        rest: RestWatch,
        layouts: Collection[LayoutName],
        step: int,
    ) -> None:
        """Prepare the audit of one check.

        Args:
            layouts: whose state is compared, among the peers of one of them. Dense replicas hold
                different experts, while expert replicas hold the same dense state too.
        """
        self._state_units = state_units
        self._watch = watch
        self._rest = rest
        self._layouts = layouts
        self._step = step

    def units(self) -> list[StateUnit]:
        """Return the units to compare: those that replicas of the layouts hold alike."""
        units = self._state_units()
        return [unit for unit in units if unit.has_replicas and unit.layout in self._layouts]

    def added_to(self, report: Report) -> Report:
        """Sign the state as it is now, and look once more at masters."""
        state = signed(self.units())
        self._watch.look(self._step)
        incoherent, moved = self._watch.found(), self._rest.changed
        return replace(report, state=state, incoherent=incoherent, moved=moved)


def signed(units: Sequence[StateUnit]) -> dict[str, Signature]:
    """Fold each unit into one signature."""
    return {unit.name: signature_of(dict(unit.tensors)) for unit in units}
