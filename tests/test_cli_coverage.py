"""`scout coverage`: the peer groups of a job, for people and for programs."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scout_core.cli import main
from scout_core.cli.coverage import parse_degrees
from scout_core.decision.topology import AXES, Topology
from scout_core.errors import ScoutError

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def scout(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Any:
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scout", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return run


def test_the_json_lists_every_group_with_what_it_can_do(scout: Any) -> None:
    code, out, err = scout("coverage", "--degrees", "d=4,t=2", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "scout.coverage/1"
    assert found["world_size"] == 8
    assert [group["ranks"] for group in found["groups"]] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for group in found["groups"]:
        assert set(group) == {"layout", "kind", "ranks", "can", "why"}
        assert (group["layout"], group["kind"], group["can"]) == ("dense", "replica", "attribute")
    assert [group["ranks"] for group in found["state_groups"]] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_table_names_groups_abilities_and_reasons(scout: Any) -> None:
    code, out, _ = scout("coverage", "--degrees", "d=2")
    assert code == 0
    assert "detect" in out
    assert "0 1" in out


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    degrees=st.dictionaries(st.sampled_from(AXES), st.integers(1, 3), min_size=1, max_size=3),
    order=st.permutations(AXES).map("".join),
)
def test_the_command_says_what_the_topology_says(
    scout: Any, degrees: dict[str, int], order: str
) -> None:
    written = ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
    _, out, _ = scout("coverage", "--degrees", written, "--order", order, "--json")
    topology = Topology.from_degrees(order=order, **degrees)
    assert [tuple(group["ranks"]) for group in json.loads(out)["groups"]] == [
        group.ranks for group in topology.peer_groups()
    ]


MISTAKES = [
    (["--degrees", "d=0"], "d=0 must be an integer >= 1"),
    (["--degrees", "dp=4"], "there is no axis 'dp'"),
    (["--degrees", "order=4"], "there is no axis 'order'"),
    (["--degrees", "=4"], "there is no axis ''"),
    (["--degrees", "d"], "part 'd' must be AXIS=NUMBER"),
    (["--degrees", ""], "part '' must be AXIS=NUMBER"),
    (["--degrees", "d=4,d=2"], "gives axis 'd' twice"),
    (["--degrees", "d=-1"], "part 'd=-1' must be AXIS=NUMBER"),
    (["--degrees", "d=\u00b2"], "must be AXIS=NUMBER"),
    (["--degrees", "d=2,t=2", "--order", "d"], "leaves out t"),
    (["--degrees", "d=4", "--hosts", "3"], "does not divide the 4 ranks"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    scout: Any, arguments: list[str], message: str
) -> None:
    code, out, err = scout("coverage", "--json", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("scout: ")
    assert err.count("\n") == 1


def test_wrong_usage_exits_with_2(scout: Any) -> None:
    assert scout("coverage")[0] == 2
    assert scout("coverage", "--degrees", "d=4", "--hosts", "many")[0] == 2
    assert scout("no-such-command")[0] == 2


@given(st.text(max_size=12))
def test_degrees_are_read_or_refused_and_nothing_else(text: str) -> None:
    try:
        degrees = parse_degrees(text)
    except ScoutError:
        return
    assert all(axis in AXES and isinstance(degree, int) for axis, degree in degrees.items())


def test_the_installed_command_runs_as_a_process() -> None:
    script = pathlib.Path(sys.executable).parent / "scout"
    command = [script, "coverage", "--degrees", "d=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
