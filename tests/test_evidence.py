"""Evidence on the wire: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.evidence import (
    Duration,
    Evidence,
    Fingerprint,
    Missing,
    Progress,
    Signature,
    from_wire,
    is_healthy_duration,
    kind_of,
    to_wire,
)
from scout_core.errors import ScoutError

UINT_64 = st.integers(0, (1 << 64) - 1)
pieces: st.SearchStrategy[Evidence] = st.one_of(
    st.builds(Progress, UINT_64, UINT_64),
    st.builds(Fingerprint, st.text(), UINT_64, st.text(), st.text()),
    st.builds(Signature, UINT_64, st.sampled_from(["xxh3", "scout64", "scout64+xxh3"])),
    st.builds(Duration, st.floats(allow_nan=False)),
    st.builds(Missing, st.text()),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(st.sampled_from(["Progress", "Missing", "Duration", "Verdict"]), inner),
    ),
)


@given(st.dictionaries(st.text(), pieces))
def test_evidence_survives_the_wire_with_its_type_and_all_64_bits(
    evidence: dict[str, Evidence],
) -> None:
    received = from_wire(to_wire(evidence))
    assert received == evidence
    assert {name: type(value) for name, value in received.items()} == {
        name: type(value) for name, value in evidence.items()
    }


def test_a_duration_that_is_nan_or_infinite_survives_the_wire() -> None:
    received = from_wire(to_wire({"t": Duration(math.nan), "u": Duration(math.inf)}))
    assert isinstance(received["t"], Duration)
    assert math.isnan(received["t"].seconds)
    assert received["u"] == Duration(math.inf)


@given(st.one_of(st.binary(), json_values.map(lambda value: json.dumps(value).encode())))
def test_anything_else_is_one_clear_error(data: bytes) -> None:
    try:
        received = from_wire(data)
    except ScoutError as error:
        received, message = {}, str(error)
        assert message.startswith(f"evidence of {len(data)} bytes")
    assert all(isinstance(value, Evidence) for value in received.values())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        b'{"x": ["Verdict", "agree"]}',
        b'{"x": ["Signature", 1]}',
        b'{"x": ["Progress", 1, 2, 3]}',
        b'{"x": []}',
        b'{"x": {"Missing": "y"}}',
        b'{"x": [["Missing"], "y"]}',
        b'{"x": ["Signature", "one", "xxh3"]}',
        b'{"x": ["Progress", 1.5, 2]}',
        b'{"x": ["Duration", "fast"]}',
        b'{"x": ["Missing", null]}',
        b'{"x": ["Progress", true, 2]}',
    ],
)
def test_a_record_of_another_form_is_refused(data: bytes) -> None:
    with pytest.raises(ScoutError, match="cannot be read"):
        from_wire(data)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Signature(1, "xxh3"), "Signature/xxh3"),
        (Signature(1, "scout64"), "Signature/scout64"),
        (Progress(1, 2), "Progress"),
        (1, "int"),
        (True, "bool"),
        (1.0, "float"),
        ("1", "str"),
    ],
)
def test_values_of_different_kinds_have_different_names(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


@given(st.floats())
def test_a_healthy_duration_is_finite_and_not_negative(seconds: float) -> None:
    assert is_healthy_duration(seconds) == (0.0 <= seconds < math.inf)
