"""Simulated timings and the comparison of rules."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from scout_core.cli.main import app
from scout_core.errors import ScoutError
from scout_core.lab.simulate import NOISES, Figures, Noise, NoiseKind, RuleName, measure


def figures(rule: RuleName, peers: int, kind: NoiseKind, scatter: float, **sizes: int) -> Figures:
    sizes = {"checks": 600, "trials": 12, **sizes}
    return measure(rule, peers, Noise(kind, scatter), slowdowns=(0.1, 0.2), seed=1, **sizes)


@pytest.mark.parametrize("peers", [3, 4, 8, 64])
def test_scouts_rule_finds_a_tenth_within_three_checks_and_accuses_no_innocent(peers: int) -> None:
    found = figures("scout", peers, "gauss", 0.01, checks=400)
    assert found.false_positives == 0
    assert found.innocent == 0
    assert found.found[0.1][3] == 1.0


@pytest.mark.parametrize("kind", ["gauss", "heavy", "hiccup"])
@pytest.mark.parametrize("peers", [3, 8])
def test_three_percent_noise_accuses_nobody(kind: NoiseKind, peers: int) -> None:
    found = figures("scout", peers, kind, 0.03)
    assert found.false_positives == 0
    assert found.found[0.2][5] > 0.8


def test_the_papers_rule_accuses_healthy_groups_all_the_time() -> None:
    assert figures("paper", 8, "gauss", 0.02, trials=1).false_positives > 0.2


def test_a_fixed_threshold_is_blind_below_and_noisy_above_it() -> None:
    assert figures("fixed", 8, "gauss", 0.01, checks=1).found[0.1][3] < 0.9
    assert figures("fixed", 8, "heavy", 0.1, trials=1).false_positives > 0.01


def test_the_same_seed_gives_the_same_figures() -> None:
    assert figures("scout", 4, "hiccup", 0.03) == figures("scout", 4, "hiccup", 0.03)


@pytest.mark.parametrize("kind", NOISES)
def test_noise_has_the_scatter_that_was_asked_for(kind: NoiseKind) -> None:
    times = Noise(kind, 0.02, repeats=1).checks(4000, 4, np.random.default_rng(0))
    logs = np.log(times)
    if kind == "hiccup":
        logs = logs[logs < np.quantile(logs, 0.97)]
    assert np.std(logs) == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    ("noise", "message"),
    [(("pink", 0.1), "noise 'pink' is unknown"), (("gauss", 0.0), "between 0 and 1")],
)
def test_unknown_noise_is_refused(noise: tuple[NoiseKind, float], message: str) -> None:
    with pytest.raises(ScoutError, match=message):
        Noise(*noise)


def test_the_command_prints_one_object_with_a_row_per_rule() -> None:
    arguments = ["simulate", "--peers", "4", "--checks", "50", "--trials", "2", "--json"]
    result = CliRunner().invoke(app, arguments)
    payload = json.loads(result.stdout)
    assert (result.exit_code, payload["schema"]) == (0, "scout.simulate/1")
    assert [row["rule"] for row in payload["rows"]] == ["scout", "paper", "fixed"]
    assert payload["rows"][0]["false_positives"] == 0


def test_the_command_prints_a_table() -> None:
    arguments = ["simulate", "--checks", "20", "--trials", "1", "--slowdowns", "50"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "8 peers, gauss noise of 2.0%" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--noise", "pink"], "--noise 'pink' is unknown"),
        (["--slowdowns", "ten"], "must be percentages above 0"),
        (["--slowdowns", "-5"], "must be percentages above 0"),
        (["--peers", "2"], "at least 3 peers"),
    ],
)
def test_bad_input_names_value_and_rule(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(result.exception, ScoutError)
    assert message in str(result.exception)
