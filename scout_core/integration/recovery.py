"""What happens after a verdict: which checkpoint, restart in place, or a machine taken out.

SCOUT itself never touches a scheduler. A `Recovery` does, and the one that comes with SCOUT prints
its commands and runs them only where somebody wrote `execute = true`.
"""

from __future__ import annotations

import os
import pathlib
import string
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Action, CheckpointChoice, Culprit, Incident, Kind
from scout_core.decision.labels import Choice, Failure
from scout_core.errors import ScoutError

ENTRY_POINTS = "scout.recovery"
"""Group under which other packages offer a `Recovery`: a callable without arguments."""

FAILURE_OF = {
    Kind.SDC: Failure.SDC,
    Kind.STRAGGLER: Failure.STRAGGLER,
    Kind.GROUP_SLOWDOWN: Failure.STRAGGLER,
    Kind.IMBALANCE: Failure.STRAGGLER,
    Kind.HANG: Failure.HANG,
    Kind.INPUT_STALL: Failure.HANG,
    Kind.CHECKPOINT_STALL: Failure.HANG,
    Kind.PROCESS_DEAD: Failure.UNKNOWN,
    Kind.NOT_COMPARABLE: Failure.UNKNOWN,
}
"""What each kind of incident means for the choice of a checkpoint."""


_STOPS = (Action.RESTART_IN_PLACE, Action.REPLACE_MACHINE)


class Recovery(Protocol):
    """What a site does about incidents. Called on every rank with the same incident.

    An exception is logged and swallowed by the session; SystemExit ends the process.
    """

    def on_incident(self, incident: Incident) -> None:
        """Take note; called first, for every incident."""

    def choose_checkpoint(self, incident: Incident, choice: Choice) -> Choice:
        """Return the checkpoint to restart from; `choice` is what Algorithm 3 says."""

    def restart_in_place(self, incident: Incident) -> None:
        """Start the job again on the same machines; may not return."""

    def replace_machine(self, incident: Incident) -> None:
        """Take the culprits' machines out and start the job again; may not return."""


class Gate(Protocol):
    """What a recovery needs of the `GateService`."""

    def advise(self, failure: Failure) -> Choice:
        """Say what would be chosen, while the job goes on."""

    def stop(self, failure: Failure) -> Choice:
        """Note why the job stops, for its next start, and say what will be chosen then."""


def answer(recovery: Recovery, incident: Incident, gate: Gate) -> Incident:
    """Let a recovery take note, and add the checkpoint to restart from; called on every rank.

    When the incident asks for a restart, the gate notes why the job stops. Nothing is stopped yet:
    report the incident, then `act`.
    """
    recovery.on_incident(incident)
    failure = FAILURE_OF[incident.kind]
    advice = gate.stop(failure) if incident.action in _STOPS else gate.advise(failure)
    choice = recovery.choose_checkpoint(incident, advice)
    chosen = CheckpointChoice(choice.choice, choice.step, choice.path or "")
    return replace(incident, checkpoint=chosen)


def act(recovery: Recovery, incident: Incident) -> None:
    """Let a recovery do what an incident asks for; called on every rank.

    Raises:
        SystemExit: the recovery ends this process.
    """
    if incident.action is Action.RESTART_IN_PLACE:
        recovery.restart_in_place(incident)
    elif incident.action is Action.REPLACE_MACHINE:
        recovery.replace_machine(incident)


class Commands(BaseModel):
    """What to run for one action."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commands: tuple[tuple[str, ...], ...] = ()
    """Program and arguments, each a template; no shell is involved."""
    exit_code: Annotated[int, Field(ge=1, le=255)] | None = None
    """End the process with this code afterwards, so that a launcher starts it again."""


class RecoveryConfig(BaseModel):
    """A file of commands, as in configs/recovery/."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    execute: bool = False
    """Run the commands; otherwise they are only printed."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one command."""
    restart_in_place: Commands = Commands()
    """When the same machines can be used again."""
    replace_machine: Commands = Commands()
    """When a machine must be taken out; once for each machine of a culprit."""

    @classmethod
    def read(cls, path: pathlib.Path) -> RecoveryConfig:
        """Read a TOML file.

        Raises:
            ScoutError: it cannot be read, has an unknown key, or a template an unknown field.
        """
        try:
            config = cls.model_validate(tomllib.loads(path.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ScoutError(f"recovery file {path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ScoutError(
                f"{key}={first['input']!r} in recovery file {path}: {first['msg'].lower()}; "
                "see configs/recovery/ for examples"
            ) from None
        _refuse_unknown_fields(config, path)
        return config


class CommandRecovery:
    """Prints, and where allowed runs, commands for the scheduler.

    Rank 0 acts for the job; every rank then leaves with the exit code, if there is one.
    """

    def __init__(self, config: RecoveryConfig, rank: int, say: Callable[[str], None]) -> None:
        """Prepare; runs nothing.

        Args:
            rank: global rank of this process.
            say: prints one line.
        """
        self._config = config
        self._leads = rank == 0
        self._say = say

    def on_incident(self, incident: Incident) -> None:
        return None

    def choose_checkpoint(self, incident: Incident, choice: Choice) -> Choice:
        return choice

    def restart_in_place(self, incident: Incident) -> None:
        self._act(self._config.restart_in_place, incident, [Culprit(-1)])

    def replace_machine(self, incident: Incident) -> None:
        machines = {culprit.host: culprit for culprit in incident.culprits if culprit.host}
        if not machines and self._leads:
            self._say("scout: the machine to replace is not known; nothing is done about it")
        self._act(self._config.replace_machine, incident, list(machines.values()))

    def _act(self, what: Commands, incident: Incident, culprits: list[Culprit]) -> None:
        for culprit in culprits if self._leads else []:
            for template in what.commands:
                self._run(template, _fields(incident, culprit))
        if what.exit_code is not None:
            raise SystemExit(what.exit_code)

    def _run(self, template: tuple[str, ...], fields: dict[str, Any]) -> None:
        try:
            command = [part.format_map(fields) for part in template]
        except KeyError as missing:
            self._say(f"scout: not run, {missing} is not set: {' '.join(template)}")
            return
        shown = subprocess.list2cmdline(command)
        if not self._config.execute:
            self._say(f"scout: would run: {shown}")
            return
        self._say(f"scout: running: {shown}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self._config.timeout_s
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._say(f"scout: failed: {error}")
            return
        output = (done.stdout + done.stderr).strip()
        self._say(f"scout: exit code {done.returncode}: {output[-500:]}")


def load_recovery(name: str, rank: int, say: Callable[[str], None]) -> Recovery | None:
    """Find a recovery by name: a TOML file of commands, or an entry point of "scout.recovery".

    No name means none.

    Raises:
        ScoutError: neither exists, or it cannot be loaded.
    """
    if not name:
        return None
    if name.endswith(".toml"):
        return CommandRecovery(RecoveryConfig.read(pathlib.Path(name)), rank, say)
    offered = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none is installed"
        raise ScoutError(
            f"recovery={name!r} is neither a .toml file nor an entry point of {ENTRY_POINTS!r} "
            f"({known}); see configs/recovery/ for files to copy"
        )
    try:
        made: Recovery = offered[name].load()()
    except (ImportError, AttributeError) as error:
        raise ScoutError(f"recovery={name!r} cannot be loaded: {error}") from error
    return made


def _fields(incident: Incident, culprit: Culprit) -> dict[str, Any]:
    """What a template may name; `{env[NAME]}` is an environment variable."""
    return {
        "host": culprit.host,
        "rank": culprit.rank,
        "device": culprit.device,
        "job": incident.job,
        "step": incident.step,
        "kind": incident.kind.value,
        "reason": incident.reason,
        "incident": incident.id,
        "message": incident.message,
        "checkpoint": incident.checkpoint.path,
        "checkpoint_step": incident.checkpoint.step,
        "env": os.environ,
    }


def _refuse_unknown_fields(config: RecoveryConfig, path: pathlib.Path) -> None:
    sample = Incident(Kind.SDC, "", Status.ATTRIBUTED, "")
    known = set(_fields(sample, Culprit(0)))
    for field in _named(config):
        if field not in known:
            raise ScoutError(
                f"{{{field}}} in recovery file {path} is unknown; "
                f"templates may name {', '.join(sorted(known))}"
            )


def _named(config: RecoveryConfig) -> Iterator[str]:
    for what in (config.restart_in_place, config.replace_machine):
        for template in what.commands:
            for part in template:
                for _, field, _, _ in string.Formatter().parse(part):
                    if field is not None:
                        yield field.split("[")[0].split(".")[0]
