"""The configuration: unknown keys and bad values are one clear error."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError

PLACE = "the TOML table [scout]"


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [field.annotation for field in model.model_fields.values()]
    nested = [kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return [model, *(found for kind in nested for found in models(kind))]


def test_defaults_work_and_nothing_written_means_the_defaults() -> None:
    assert ScoutConfig.parse({}, PLACE) == ScoutConfig()


def test_what_is_written_is_taken_and_survives_a_round_trip() -> None:
    config = ScoutConfig.parse({"interval_steps": 7, "hang": {"stall_timeout_s": 2.5}}, PLACE)
    assert (config.interval_steps, config.hang.stall_timeout_s) == (7, 2.5)
    assert ScoutConfig.parse(config.model_dump(), PLACE) == config


def test_every_field_is_documented_and_there_are_at_most_20_per_model() -> None:
    for model in models(ScoutConfig):
        assert len(model.model_fields) <= 20, model
        for name, field in model.model_fields.items():
            assert field.description, (model, name)
            assert model.model_config.get("extra") == "forbid"


def test_a_field_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        ScoutConfig().interval_steps = 3  # type: ignore[misc]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"interval": 5}, "unknown key 'interval' in the TOML table"),
    ({"hang": {"timeout": 5}}, "unknown key 'hang.timeout' in the TOML table"),
    ({"kappa": 0}, "kappa=0 in the TOML table"),
    ({"kappa": -1.5}, "kappa=-1.5 in"),
    ({"kappa": math.nan}, "kappa=nan in"),
    ({"kappa": math.inf}, "kappa=inf in"),
    ({"interval_steps": 0}, "interval_steps=0 in"),
    ({"interval_steps": 2.5}, "interval_steps=2.5 in"),
    ({"confirm_repeats": -1}, "confirm_repeats=-1 in"),
    ({"exchange_timeout_s": "soon"}, "exchange_timeout_s='soon' in"),
    ({"on_error": "ignore"}, "on_error='ignore' in"),
    ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last=0 in"),
    ({"hang": 3}, "hang=3 in"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_names_key_value_and_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoutError) as caught:
        ScoutConfig.parse(values, PLACE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_is_answered_with_the_known_ones_of_its_table() -> None:
    with pytest.raises(ScoutError, match=r"known keys are .*stall_timeout_s"):
        ScoutConfig.parse({"hang": {"timeout": 5}}, PLACE)
    with pytest.raises(ScoutError, match=r"known keys are .*interval_steps"):
        ScoutConfig.parse({"interval": 5}, PLACE)


@given(st.text(min_size=1).filter(lambda key: key not in ScoutConfig.model_fields))
def test_no_unknown_key_is_ever_accepted(key: str) -> None:
    with pytest.raises(ScoutError, match="unknown key"):
        ScoutConfig.parse({key: 1}, PLACE)
