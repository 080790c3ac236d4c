"""State at rest: what is compared with replicas, and what only with its own past."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from scout_core.decision.replay_verdict import Report
from scout_core.decision.topology import LayoutName
from scout_core.evidence.coherence import CoherenceWatch
from scout_core.evidence.rest import RestWatch
from scout_core.integration.audit import Audit, signed
from scout_core.integration.framework import StateUnit


def units() -> list[StateUnit]:
    values = torch.arange(4.0)
    return [
        StateUnit("weights", (("w", values),)),
        StateUnit("experts", (("e", values),), "expert"),
        StateUnit("masters", (("m", values),), has_replicas=False),
    ]


def audit(layouts: Sequence[LayoutName]) -> Audit:
    rest = RestWatch(lambda: signed(units()))
    return Audit(units, CoherenceWatch(tuple), rest, frozenset(layouts), 3)


@pytest.mark.parametrize(
    ("layouts", "names"),
    [
        (["dense"], ["weights"]),
        (["expert"], ["experts"]),
        (["dense", "expert"], ["weights", "experts"]),
    ],
)
def test_only_units_of_the_layouts_that_have_replicas_are_compared(
    layouts: list[LayoutName], names: list[str]
) -> None:
    assert list(audit(layouts).added_to(Report()).state) == names


def test_state_with_one_owner_is_compared_with_its_own_past() -> None:
    all_units = units()
    rest = RestWatch(lambda: signed(all_units))
    rest.remember()
    all_units[2].tensors[0][1][1] += 1.0
    rest.look()
    assert "masters" in rest.changed
