"""Each fault is reported once; naming the rows of an expert says more than not naming them."""

from __future__ import annotations

from typing import Any

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Culprit, Incident, Kind
from scout_core.integration.ledger import Ledger, stamped


def fault(rank: int, **evidence: Any) -> Incident:
    return Incident(
        Kind.SDC, "SDC_X", Status.ATTRIBUTED, "m", culprits=(Culprit(rank),), evidence=evidence
    )


def test_a_fault_is_reported_once_until_it_has_been_seen_healthy() -> None:
    ledger = Ledger(lambda incident: incident)
    assert ledger.record(fault(1), "layer")
    assert not ledger.record(fault(1), "other layer")
    assert ledger.clear(frozenset(["layer"]), ()) != []
    assert ledger.record(fault(1), "layer")


def test_the_rows_of_an_expert_are_reported_after_the_layer_was() -> None:
    ledger = Ledger(lambda incident: incident)
    assert ledger.record(fault(1), "layer")
    assert ledger.record(fault(1, rows=[8, 8]), "experts at 2 x 8 rows")
    assert not ledger.record(fault(1, rows=[16, 16]), "experts at 2 x 16 rows")


def test_the_layer_is_not_reported_after_the_rows_were() -> None:
    ledger = Ledger(lambda incident: incident)
    assert ledger.record(fault(1, rows=[8, 8]), "experts at 2 x 8 rows")
    assert not ledger.record(fault(1), "layer")
    assert ledger.record(fault(2), "layer")


def test_incidents_of_one_fault_have_one_identity_on_all_ranks() -> None:
    one, two = (stamped(fault(1, rows=[8]), "job", f"time {rank}") for rank in range(2))
    assert one.id == two.id
    assert one.id != stamped(fault(2), "job").id
