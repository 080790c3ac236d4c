"""`--scout` and its options: one for each field, checked at once, and no cost without them."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scout_megatron.__main__ import main
from scout_megatron.options import add_options, config_of, options

from scout_core.config import ScoutConfig


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_options(add_options(parser)).parse_args(argv)


def test_without_options_scout_is_off_and_the_configuration_is_the_default() -> None:
    args = parsed()
    assert args.scout is False
    assert config_of(args) == ScoutConfig()


def test_every_field_has_an_option_that_help_explains() -> None:
    text = add_options(argparse.ArgumentParser()).format_help()
    flags = [option.flag for option in options()]
    assert len(set(flags)) == len(flags)
    assert all(flag in text for flag in flags)
    assert "--scout-hang-stall-timeout-s" in flags
    assert "V/(I*N)" in text


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 1000), st.floats(0.1, 1e6), st.booleans())
def test_values_of_options_arrive_in_their_fields(steps: int, limit: float, on: bool) -> None:
    config = config_of(
        parsed(
            *("--scout", "--scout-interval-steps", str(steps)),
            *("--scout-hang-stall-timeout-s", repr(limit), "--scout-hang-enabled", str(on)),
        )
    )
    assert config.interval_steps == steps
    assert config.hang.stall_timeout_s == limit
    assert config.hang.enabled is on


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--scout-interval-steps", "0"), "interval_steps='0' in the option --scout-interval"),
        (("--scout-kappa", "x"), "kappa='x' in the option --scout-kappa"),
        (("--scout-hang-stall-timeout-s", "-1"), "hang.stall_timeout_s='-1' in the option"),
    ],
)
def test_a_bad_value_ends_the_program_with_one_line(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*argv)
    assert str(ended.value).startswith(f"scout: {message}")


@pytest.mark.parametrize(
    ("argv", "message"), [([], "no script named"), (["nowhere.py"], "'nowhere.py' is not a file")]
)
def test_the_launcher_names_what_is_missing(argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(argv)


def test_the_launchers_own_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    text = capsys.readouterr().out
    assert "pretrain_gpt.py ... --scout" in text
    assert all(option.flag in text for option in options())


def test_the_launcher_loads_nothing_without_the_switch(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "1"], sys.argv
            assert sys.path[0] == sys.argv[0].rpartition("/")[0], sys.path[0]
            heavy = ("torch", "pydantic", "megatron", "scout_core.", "scout_megatron.t")
            print([name for name in sys.modules if name.startswith(heavy)])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "scout_megatron", str(script), "--lr", "1"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
