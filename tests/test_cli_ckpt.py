"""`scout ckpt`: what it prints, what it changes and how it exits."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from scout_core.cli import main as entry
from scout_core.evidence.exchange import LocalExchange, LocalHall
from scout_core.integration.gate_service import GateService
from scout_core.integration.saves import Job
from scout_core.integration.trust_record import TrustStore


class Scout:
    """The command, run in this process as from a shell."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._patch.setattr(sys, "argv", ["scout", "ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            entry.main()
        self.out, self.err = self._capture.readouterr()
        return int(left.value.code or 0)

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def scout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scout:
    return Scout(monkeypatch, capsys)


def train(folder: pathlib.Path, outcomes: str, job: Job | None = None) -> pathlib.Path:
    """One check and one save per letter; K is 2."""
    words = {"c": "clean", "x": "sdc", "i": "inconclusive"}
    service = GateService(folder, LocalExchange(0, LocalHall(1)), job or Job(2, name="tiny"))
    for step, letter in enumerate(outcomes, 1):
        service.record(step, step % 2, words[letter])
        service.begin_save(step)
        place = folder / f"step-{step}"
        place.mkdir()
        (place / "shard").write_bytes(bytes([step]) * 1000)
        service.add_pending(step, str(place), lambda: "")
        service.settle()
    service.drain()
    service.close()
    return folder


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 1 to 7; 4 is verified, 6 the candidate."""
    return train(tmp_path / "run", "ccccccc")


def flip_a_bit(folder: pathlib.Path) -> None:
    content = bytearray((folder / "shard").read_bytes())
    content[500] ^= 1
    (folder / "shard").write_bytes(content)


@pytest.mark.parametrize(
    ("options", "choice", "step"),
    [
        (["--failure", "sdc"], "verified", 4),
        (["--failure", "straggler"], "latest", 7),
        (["--failure", "none"], "latest", 7),
        (["--failure", "unreachable"], "verified", 4),
        (["--failure", "straggler", "--unreachable"], "verified", 4),
        (["--failure", "hang"], "verified", 4),
        (["--failure", "hang", "--sweep", "clean"], "latest", 7),
        (["--failure", "hang", "--sweep", "dirty"], "verified", 4),
        ([], "verified", 4),  # the job ended without a word
    ],
)
def test_select_answers_algorithm_3(
    scout: Scout, run: pathlib.Path, options: list[str], choice: str, step: int
) -> None:
    assert scout("select", run, *options, "--json") == 0
    assert scout.json["schema"] == "scout.ckpt/1"
    assert scout.json["choice"] == choice
    assert scout.json["step"] == step
    assert scout.json["path"] == str(run / f"step-{step}")
    assert scout("select", run, *options) == 0
    assert scout.out == f"{run}/step-{step}\n"  # nothing else on stdout: $(scout ckpt select ...)


def test_select_takes_the_failure_from_the_environment(
    scout: Scout, run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOUT_FAILURE", "straggler")
    assert scout("select", run, "--json") == 0
    assert scout.json["step"] == 7


def test_select_exits_4_when_nothing_can_be_trusted(scout: Scout, tmp_path: pathlib.Path) -> None:
    folder = train(tmp_path / "run", "cccx")
    assert scout("select", folder, "--failure", "straggler", "--json") == 4
    assert scout.json["choice"] == "none"
    assert scout.json["path"] is None
    assert "corruption was seen" in scout.json["why"]
    assert scout("select", folder, "--failure", "straggler") == 4
    assert scout.out == ""


def test_select_steps_back_over_damage_and_changes_nothing(scout: Scout, run: pathlib.Path) -> None:
    before = TrustStore(run).path.read_bytes()
    flip_a_bit(run / "step-4")
    assert scout("select", run, "--failure", "sdc", "--json") == 0
    assert scout.json["step"] == 2
    assert "damaged or gone: step-4" in scout.json["why"]
    assert scout("select", run, "--failure", "sdc", "--quick", "--json") == 0
    assert scout.json["step"] == 4  # sizes alone do not show it
    assert TrustStore(run).path.read_bytes() == before


def test_uncertified_is_chosen_only_when_a_person_accepts_it(
    scout: Scout, tmp_path: pathlib.Path
) -> None:
    folder = train(tmp_path / "run", "ccccc", Job(2, ("one owner per shard",)))
    assert scout("select", folder, "--failure", "sdc", "--json") == 4
    assert "one owner per shard" in scout.json["why"]
    assert scout("select", folder, "--failure", "sdc", "--accept-uncertified", "--json") == 0
    assert scout.json["step"] == 2
    assert "accepted by hand" in scout.json["why"]


def test_list_shows_labels_and_evidence(scout: Scout, run: pathlib.Path) -> None:
    assert scout("list", run, "--json") == 0
    rows = {row["step"]: row for row in scout.json["checkpoints"]}
    assert [rows[step]["label"] for step in sorted(rows)] == [
        "unproven",
        "verified",
        "unproven",
        "verified",
        "unproven",
        "candidate",
        "unproven",
    ]
    assert rows[4]["signed"]
    assert rows[4]["present"]
    assert rows[4]["size_bytes"] == 1000
    assert scout.json["job"] == "tiny"
    assert scout("list", run) == 0
    assert "candidate" in scout.out


def test_verify_names_the_file_and_the_checkpoint_is_never_chosen_again(
    scout: Scout, run: pathlib.Path
) -> None:
    assert scout("verify", run) == 0
    flip_a_bit(run / "step-4")
    (run / "step-7" / "shard").unlink()
    assert scout("verify", run, "--quick", "--json") == 3
    assert scout.json["damaged"] == ["step-7"]
    assert scout("verify", run, "--checkpoint", "4", "--json") == 3
    assert scout.json["checkpoints"][0]["problems"] == [
        "shard has other content than when it was saved"
    ]
    assert scout("select", run, "--failure", "sdc", "--quick", "--json") == 0
    assert scout.json["step"] == 2
    assert scout("select", run, "--failure", "straggler", "--quick", "--json") == 0
    assert scout.json["step"] == 6


def test_a_pinned_checkpoint_is_not_dropped(scout: Scout, run: pathlib.Path) -> None:
    assert scout("pin", run, "4", "--json") == 0
    assert scout.json["checkpoint"]["pinned"]
    assert scout("drop", run, "4") == 2
    assert "pinned" in scout.err
    assert scout("pin", run, "4", "--off") == 0
    assert scout("drop", run, "step-4", "--delete", "--json") == 0
    assert scout.json["checkpoint"]["label"] == "dropped"
    assert not (run / "step-4").exists()
    assert scout("select", run, "--failure", "sdc", "--json") == 0
    assert scout.json["step"] == 2


@pytest.mark.parametrize("loss", ["truncated", "missing"])
def test_rebuild_enters_whole_checkpoints_as_uncertified(
    scout: Scout, run: pathlib.Path, loss: str
) -> None:
    record = TrustStore(run).path
    assert scout("rebuild", run) == 2
    assert "--force" in scout.err
    record.write_bytes(record.read_bytes()[:100])
    if loss == "missing":
        record.unlink()
    flip_a_bit(run / "step-3")
    (run / "step-5" / "scout_manifest.json").unlink()
    assert scout("list", run) == 2
    assert "scout ckpt rebuild" in scout.err
    assert scout("rebuild", run, "--json") == 0
    found = {row["step"]: row["label"] for row in scout.json["checkpoints"]}
    assert found == dict.fromkeys([1, 2, 4, 6, 7], "uncertified")
    why = {row["folder"]: row["why"] for row in scout.json["left_out"]}
    assert "other content" in why["step-3"]
    assert "scout_manifest.json" in why["step-5"]
    assert (scout.json["former"] is None) == (loss == "missing")
    assert scout("select", run, "--failure", "none") == 4
    assert scout("select", run, "--failure", "none", "--accept-uncertified", "--json") == 0
    assert scout.json["step"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select", "RUN", "--failure", "crash"], "--failure='crash' must be one of sdc"),
        (["select", "RUN", "--failure", "hang", "--sweep", "ok"], "--sweep='ok' must be clean"),
        (["select", "RUN/nowhere"], "holds no scout_trust.json"),
        (["pin", "RUN", "99"], "no checkpoint '99'; the record has 1 (step-1)"),
        (["rebuild", "RUN/nowhere"], "is no folder"),
    ],
)
def test_mistakes_exit_2_and_name_the_way_out(
    scout: Scout, run: pathlib.Path, arguments: list[str], message: str
) -> None:
    assert scout(*(argument.replace("RUN", str(run)) for argument in arguments)) == 2
    assert message in scout.err


def test_the_command_loads_no_torch(run: pathlib.Path) -> None:
    code = (
        "import sys; from scout_core.cli import ckpt; import typer;"
        "typer.main.get_command(ckpt.app)(['select', sys.argv[1], '--failure', 'sdc'],"
        " standalone_mode=False); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run}/step-4\n"
