"""The table [scout] and the options --scout.*: every field of `ScoutConfig`, checked alike."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError

tyro = pytest.importorskip("tyro")
from scout_torchtitan.settings import OWN, Scout, config_of  # noqa: E402


def test_every_field_of_the_configuration_is_a_setting_with_the_same_default() -> None:
    fields = {field.name for field in dataclasses.fields(Scout)}
    assert fields == set(ScoutConfig.model_fields) | set(OWN)
    assert config_of(Scout()) == ScoutConfig()


def test_scout_is_off_unless_the_flag_is_given() -> None:
    assert Scout().enable is False
    assert tyro.cli(Scout, args=["--enable"]).enable is True


def test_the_command_line_wins_over_the_file_also_in_nested_tables() -> None:
    from_file = Scout(interval_steps=7, hang=type(Scout().hang)(stall_timeout_s=9.0))
    args = ["--hang.stall-timeout-s", "3", "--layers", "blocks"]
    config = config_of(tyro.cli(Scout, args=args, default=from_file))
    assert (config.interval_steps, config.hang.stall_timeout_s) == (7, 3.0)
    assert config.layers == "blocks"


@pytest.mark.parametrize(
    ("values", "named"),
    [({"interval_steps": 0}, "interval_steps=0"), ({"on_error": "panic"}, "on_error='panic'")],
)
def test_a_bad_value_is_one_error_that_names_it_and_its_place(
    values: dict[str, object], named: str
) -> None:
    with pytest.raises(ScoutError, match=rf"{named} in the TOML table \[scout\]"):
        config_of(Scout(**values))


def test_a_job_that_leaves_scout_off_imports_its_definition_of_settings_and_no_more_of_it() -> None:
    program = "import sys, scout_torchtitan.settings; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50
    )
    loaded = {name for name in printed.stdout.split() if name.startswith(("scout_", "torch."))}
    assert loaded == {
        "scout_core",
        "scout_core.config",
        "scout_core.errors",
        "scout_torchtitan",
        "scout_torchtitan.settings",
    }
