"""The record of a fault: complete, strict JSON, and readable back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.consensus import Status
from scout_core.decision.incident import (
    Action,
    CheckpointChoice,
    Culprit,
    Incident,
    Kind,
    name_ranks,
)
from scout_core.decision.topology import Coordinate
from scout_core.errors import ScoutError

ranks = st.integers(0, 1 << 20)
coordinates = st.builds(Coordinate, *[st.integers(0, 99)] * 6)
culprits = st.builds(
    Culprit, ranks, st.text(), st.text(), st.one_of(st.none(), coordinates), st.text(), st.text()
)
choices = st.builds(
    CheckpointChoice,
    st.sampled_from(["latest", "verified", "none"]),
    st.one_of(st.none(), st.integers(0)),
    st.text(),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=5,
).filter(lambda value: "inf" not in repr(value))
incidents = st.builds(
    Incident,
    kind=st.sampled_from(Kind),
    reason=st.text(),
    status=st.sampled_from([Status.ATTRIBUTED, Status.INCONCLUSIVE]),
    message=st.text(),
    id=st.text(),
    time=st.text(),
    job=st.text(),
    step=st.integers(-1),
    culprits=st.lists(culprits, max_size=3).map(tuple),
    victims=st.lists(ranks, max_size=3).map(tuple),
    peer_group=st.lists(ranks, max_size=3).map(tuple),
    evidence=st.dictionaries(st.text(), json_values, max_size=3),
    action=st.sampled_from(Action),
    checkpoint=choices,
)
RECORD = Incident(
    kind=Kind.SDC,
    reason="SDC_REPLAY_OUTPUT",
    status=Status.ATTRIBUTED,
    message="rank 5 on node-1 computed another output of layers.3",
    culprits=(Culprit(5, "node-1", coordinate=Coordinate(d=2, t=1)),),
).to_json()


@given(incidents)
def test_a_record_read_back_from_text_is_the_same_incident(incident: Incident) -> None:
    assert Incident.from_json(json.loads(json.dumps(incident.to_json()))) == incident


def test_the_record_has_the_agreed_schema_and_fields() -> None:
    fields = "id time job step kind reason status culprits victims peer_group evidence action"
    assert set(RECORD) == {"schema", *fields.split(), "checkpoint", "message"}
    assert RECORD["schema"] == "scout.incident/1"
    assert (RECORD["kind"], RECORD["status"], RECORD["action"]) == ("sdc", "attributed", "escalate")
    assert RECORD["culprits"][0] == {
        "rank": 5,
        "host": "node-1",
        "device": "",
        "coordinate": {"d": 2, "s": 0, "t": 1, "p": 0, "c": 0, "e": 0},
        "module": "",
        "where": "",
    }
    assert RECORD["checkpoint"] == {"choice": "none", "step": None, "path": ""}


def test_values_that_json_lacks_become_text() -> None:
    seconds = {"0": math.nan, "1": math.inf, "2": 0.5}
    incident = Incident(
        Kind.STRAGGLER, "X", Status.INCONCLUSIVE, "no time", evidence={"seconds": seconds}
    )
    plain = incident.to_json()
    json.dumps(plain, allow_nan=False)
    assert plain["evidence"]["seconds"] == {"0": "NaN", "1": "Infinity", "2": 0.5}


BROKEN: list[Any] = [
    {},
    [],
    None,
    "incident",
    {**RECORD, "schema": "scout.incident/2"},
    {**RECORD, "kind": "bug"},
    {**RECORD, "status": "agree"},
    {**RECORD, "status": "guilty"},
    {**RECORD, "action": None},
    {**RECORD, "culprits": [7]},
    {**RECORD, "culprits": [{"rank": 1, "mood": "sad"}]},
    {**RECORD, "culprits": [{"rank": 1, "coordinate": {"z": 1}}]},
    {**RECORD, "victims": None},
    {**RECORD, "checkpoint": "latest"},
    {**RECORD, "extra": 1},
    {name: value for name, value in RECORD.items() if name != "message"},
]


@pytest.mark.parametrize("record", BROKEN, ids=range(len(BROKEN)))
def test_a_record_that_is_no_incident_is_one_clear_error(record: Any) -> None:
    with pytest.raises(ScoutError, match="incident record cannot be read"):
        Incident.from_json(record)


@given(st.lists(culprits, max_size=5))
def test_culprit_ranks_are_ascending_and_named_once(found: list[Culprit]) -> None:
    incident = Incident(Kind.HANG, "X", Status.ATTRIBUTED, "stuck", culprits=tuple(found))
    assert list(incident.culprit_ranks) == sorted({culprit.rank for culprit in found})


def test_agreement_is_no_incident() -> None:
    with pytest.raises(AssertionError):
        Incident(Kind.SDC, "X", Status.AGREE, "nothing")


def test_ranks_are_named_in_words() -> None:
    assert name_ranks(()) == "no rank"
    assert name_ranks((Culprit(5),)) == "rank 5"
    assert name_ranks((Culprit(5, "b"),)) == "rank 5 on b"
    assert (
        name_ranks((Culprit(1, "a"), Culprit(2), Culprit(3, "b"))) == "ranks 1 on a, 2 and 3 on b"
    )
