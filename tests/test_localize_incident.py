"""A diagnosis of slow groups as incidents."""

from __future__ import annotations

import pytest

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, Incident, Kind
from scout_core.decision.localize import localize
from scout_core.decision.localize_incident import to_incidents
from scout_core.decision.topology import Topology

TOPOLOGY = Topology.from_degrees(
    d=4, s=2, t=2, order="tds", hosts=[f"host-{rank % 8}" for rank in range(16)]
)


def incident(*slow: tuple[tuple[int, ...], str]) -> Incident:
    observations = [(ranks, kind, True) for ranks, kind in slow]
    (found,) = to_incidents(
        localize(TOPOLOGY, observations, resources={4: "GPU-4"}),
        TOPOLOGY,
        step=7,
        slowdowns={(4, 5): 1.25},
    )
    return found


def test_a_machine_is_a_culprit_with_host_device_and_address() -> None:
    found = incident(((4, 5), "fsdp"), ((4, 12), "tp"))
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.host, culprit.device) == (4, "host-4", "GPU-4")
    assert culprit.coordinate == TOPOLOGY.dense[4]
    assert (found.kind, found.reason) == (Kind.STRAGGLER, "STRAGGLER_MACHINE")
    assert (found.status, found.action) == (Status.ATTRIBUTED, Action.REPLACE_MACHINE)
    assert "rank 4 on host-4" in found.message
    assert "up to 1.25 times" in found.message
    assert "at step 7" in found.message


@pytest.mark.parametrize(
    ("slow", "reason", "action"),
    [
        ([((4, 12), "tp")], "STRAGGLER_LINK", Action.DIAGNOSE_HARDWARE),
        ([((4, 5), "fsdp")], "STRAGGLER_NETWORK", Action.DIAGNOSE_NETWORK),
        ([((r, r + 8), "tp") for r in range(5)], "SLOWDOWN_CLUSTER", Action.ESCALATE),
    ],
)
def test_the_other_conclusions_name_no_rank(
    slow: list[tuple[tuple[int, ...], str]], reason: str, action: Action
) -> None:
    found = incident(*slow)
    assert (found.reason, found.action, found.culprits) == (reason, action, ())
    assert found.status is Status.INCONCLUSIVE
    assert "no rank named" in found.message


def test_an_incident_of_slow_groups_survives_json() -> None:
    found = incident(((4, 5), "fsdp"), ((4, 12), "tp"))
    assert Incident.from_json(found.to_json()) == found


def test_the_same_finding_has_the_same_id_and_another_one_has_not() -> None:
    machine, link = incident(((4, 5), "s"), ((4, 12), "t")), incident(((4, 12), "t"))
    assert machine.id == incident(((12, 4), "tp"), ((5, 4), "fsdp")).id
    assert machine.id != link.id


def test_two_ranks_of_one_machine_are_reported_as_the_machine() -> None:
    found = incident(((4, 5), "fsdp"), ((12, 13), "fsdp"), ((4, 12), "tp"))
    assert found.culprit_ranks == (4, 12)
    assert "slow on host-4" in found.message
