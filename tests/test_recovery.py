"""What follows an incident: the checkpoint, the commands, and that nothing runs by default."""

from __future__ import annotations

import pathlib
import sys
from dataclasses import replace

import pytest

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, CheckpointChoice, Culprit, Incident, Kind
from scout_core.decision.labels import Choice, Failure
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import LocalExchange, LocalHall
from scout_core.integration import recovery
from scout_core.integration.gate_service import GateService
from scout_core.integration.recovery import (
    CommandRecovery,
    RecoveryConfig,
    act,
    answer,
    load_recovery,
)
from scout_core.integration.saves import Job
from scout_core.integration.trust_record import TrustStore

CONFIGS = pathlib.Path(__file__).parent.parent / "configs" / "recovery"
CULPRITS = (Culprit(5, "node-b"), Culprit(6, "node-b"), Culprit(9, "node-c"))


def incident(kind: Kind = Kind.SDC, action: Action = Action.REPLACE_MACHINE) -> Incident:
    return Incident(
        kind,
        "SDC_STATE",
        Status.ATTRIBUTED,
        "rank 5 is wrong",
        id="ab12",
        job="tiny",
        step=7,
        culprits=CULPRITS,
        action=action,
    )


class Site:
    """A recovery that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.incident: Incident | None = None

    def on_incident(self, incident: Incident) -> None:
        self.calls.append("on_incident")

    def choose_checkpoint(self, incident: Incident, choice: Choice) -> Choice:
        self.calls.append(f"choose {choice.choice} {choice.step}")
        return choice

    def restart_in_place(self, incident: Incident) -> None:
        self.calls.append("restart_in_place")
        self.incident = incident

    def replace_machine(self, incident: Incident) -> None:
        self.calls.append("replace_machine")
        self.incident = incident


@pytest.fixture
def gate(tmp_path: pathlib.Path) -> GateService:
    """A job of one rank after 5 clean checks with K = 2: 2 is verified, 5 the latest."""
    service = GateService(tmp_path / "run", LocalExchange(0, LocalHall(1)), Job(2))
    for step in range(1, 6):
        service.record(step, step % 2, "clean")
        place = tmp_path / "run" / f"step-{step}"
        place.mkdir()
        (place / "shard").write_bytes(b"x")
        service.add_pending(step, str(place), lambda: "")
        service.settle()
    return service


@pytest.mark.parametrize(
    ("kind", "action", "choice", "step"),
    [
        (Kind.SDC, Action.REPLACE_MACHINE, "verified", 2),
        (Kind.STRAGGLER, Action.REPLACE_MACHINE, "latest", 5),
        (Kind.GROUP_SLOWDOWN, Action.DIAGNOSE_NETWORK, "latest", 5),
        (Kind.HANG, Action.RESTART_IN_PLACE, "verified", 2),
        (Kind.PROCESS_DEAD, Action.RESTART_IN_PLACE, "verified", 2),
        (Kind.NOT_COMPARABLE, Action.NONE, "verified", 2),
    ],
)
def test_each_kind_leads_to_its_checkpoint_and_each_action_to_its_method(
    gate: GateService, kind: Kind, action: Action, choice: str, step: int
) -> None:
    site = Site()
    after = answer(site, incident(kind, action), gate)
    act(site, after)
    path = str(gate.folder / f"step-{step}")
    assert after.checkpoint == CheckpointChoice(choice, step, path)
    called = {Action.REPLACE_MACHINE: 1, Action.RESTART_IN_PLACE: 1}.get(action, 0)
    assert site.calls == ["on_incident", f"choose {choice} {step}", action.value][: 2 + called]
    assert (site.incident == after) == bool(called)


@pytest.mark.parametrize(
    ("action", "failure"),
    [(Action.REPLACE_MACHINE, Failure.STRAGGLER), (Action.ESCALATE, Failure.UNKNOWN)],
)
def test_why_a_job_stops_is_kept_for_its_next_start(
    gate: GateService, action: Action, failure: Failure
) -> None:
    act(Site(), answer(Site(), incident(Kind.STRAGGLER, action), gate))
    assert TrustStore(gate.folder).load().failure is failure


def test_every_kind_of_incident_has_a_failure() -> None:
    assert set(recovery.FAILURE_OF) == set(Kind)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.name)
def test_the_files_that_come_with_scout_run_nothing(file: pathlib.Path) -> None:
    assert not RecoveryConfig.read(file).execute


def test_each_machine_is_taken_out_once_and_only_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(recovery.subprocess, "run", None)  # running anything would be an error
    said: list[str] = []
    slurm = load_recovery(str(CONFIGS / "slurm.toml"), 0, said.append)
    with pytest.raises(SystemExit) as left:
        slurm.replace_machine(incident())
    assert left.value.code == 75
    state = '"Reason=scout SDC_STATE ab12"'
    assert said == [
        f"scout: would run: scontrol update NodeName=node-b State=DRAIN {state}",
        "scout: would run: scontrol requeue 4711",
        f"scout: would run: scontrol update NodeName=node-c State=DRAIN {state}",
        "scout: would run: scontrol requeue 4711",
    ]


def test_only_rank_0_acts_and_every_rank_leaves() -> None:
    said: list[str] = []
    kubernetes = load_recovery(str(CONFIGS / "kubernetes.toml"), 3, said.append)
    with pytest.raises(SystemExit):
        kubernetes.replace_machine(incident())
    assert said == []


def test_an_unknown_machine_is_said_and_nothing_else_is_done() -> None:
    said: list[str] = []
    nobody = replace(incident(), culprits=(Culprit(5),))
    kubernetes = load_recovery(str(CONFIGS / "kubernetes.toml"), 0, said.append)
    with pytest.raises(SystemExit):
        kubernetes.replace_machine(nobody)
    assert said == ["scout: the machine to replace is not known; nothing is done about it"]


def write_config(folder: pathlib.Path, text: str) -> RecoveryConfig:
    file = folder / "site.toml"
    file.write_text(text)
    return RecoveryConfig.read(file)


def test_commands_run_without_a_shell_when_switched_on(tmp_path: pathlib.Path) -> None:
    program = f'["{sys.executable}", "-c", "import sys; print(sys.argv[1:])", "{{host}}; rm -rf /"]'
    config = write_config(tmp_path, f"execute = true\n[replace_machine]\ncommands = [{program}]")
    said: list[str] = []
    CommandRecovery(config, 0, said.append).replace_machine(incident())
    assert said[1] == "scout: exit code 0: ['node-b; rm -rf /']"
    assert len(said) == 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ('["/no/such/program"]', "failed: "),
        (f'["{sys.executable}", "-c", "raise SystemExit(3)"]', "exit code 3"),
        ('["echo", "{env[NO_SUCH_VARIABLE]}"]', "not run, 'NO_SUCH_VARIABLE' is not set"),
    ],
)
def test_a_command_that_fails_is_said_and_the_next_one_runs(
    tmp_path: pathlib.Path, command: str, message: str
) -> None:
    text = f'execute = true\n[restart_in_place]\ncommands = [{command}, ["echo", "next"]]'
    said: list[str] = []
    CommandRecovery(write_config(tmp_path, text), 0, said.append).restart_in_place(incident())
    assert message in "\n".join(said)
    assert said[-1] == "scout: exit code 0: next"


def test_a_command_that_never_ends_is_stopped(tmp_path: pathlib.Path) -> None:
    text = 'execute = true\ntimeout_s = 0.1\n[restart_in_place]\ncommands = [["sleep", "60"]]'
    said: list[str] = []
    CommandRecovery(write_config(tmp_path, text), 0, said.append).restart_in_place(incident())
    assert "timed out" in said[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exceute = true", "exceute=True in recovery file"),
        ('[replace_machine]\ncommands = [["drain", "{node}"]]', r"\{node\} in recovery file"),
        ("[replace_machine", "cannot be read"),
        ("timeout_s = 0", "timeout_s=0"),
    ],
)
def test_a_mistake_in_the_file_is_found_when_it_is_read(
    tmp_path: pathlib.Path, text: str, message: str
) -> None:
    with pytest.raises(ScoutError, match=message):
        write_config(tmp_path, text)


def test_other_packages_offer_recoveries_by_entry_point(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site_recovery-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-recovery\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[scout.recovery]\nours = site_recovery:Ours\nbroken = site_recovery:Missing\n"
    )
    (tmp_path / "site_recovery.py").write_text("class Ours:\n    name = 'ours'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_recovery("ours", 0, print).name == "ours"  # type: ignore[attr-defined]
    with pytest.raises(ScoutError, match="'broken' cannot be loaded"):
        load_recovery("broken", 0, print)
    with pytest.raises(ScoutError, match=r"'theirs' is neither .*broken, ours"):
        load_recovery("theirs", 0, print)
