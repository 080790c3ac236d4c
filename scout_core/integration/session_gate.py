"""The checkpoint gate as a session uses it: checks go in, advice for incidents comes out."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from scout_core.config import ScoutConfig
from scout_core.decision.incident import Incident
from scout_core.decision.labels import Choice, Failure, Outcome
from scout_core.decision.topology import Topology
from scout_core.evidence.exchange import Exchange
from scout_core.integration.checker import Told
from scout_core.integration.checkpoint import GatedCheckpoint, Manager, Phase, open_checkpoint
from scout_core.integration.gate_service import GateService
from scout_core.integration.record_keeper import Emit
from scout_core.integration.recovery import Recovery, act, answer
from scout_core.integration.restore_state import TrainingState
from scout_core.integration.saves import Job
from scout_core.integration.session_coverage import SessionCoverage

Folder = str | os.PathLike[str]


class SessionGate:
    """Feeds the gate with every replay of the job, and answers incidents with a checkpoint."""

    def __init__(
        self,
        exchange: Exchange,
        config: ScoutConfig,
        topology: Topology,
        coverage: Callable[[], SessionCoverage],
        emit: Emit,
        phase: Phase,
        recovery: Recovery | None,
    ) -> None:
        """Prepare; `open` begins the record of a folder."""
        self._exchange = exchange
        self._config = config
        self._topology = topology
        self._coverage = coverage
        self._emit = emit
        self._phase = phase
        self._recovery = recovery
        self.service: GateService | None = None
        """The gate; None until a folder was opened."""

    def open(self, folder: Folder) -> GateService:
        """Open the trust record of a folder of checkpoints that a framework writes; collective."""
        self.service = GateService(folder, self._exchange, self._job(), self._emit)
        return self.service

    def checkpoint(self, place: Folder | Manager, target: TrainingState) -> GatedCheckpoint:
        """Open a folder of DCP checkpoints, or a manager's; collective, once."""
        opened = open_checkpoint(
            place, self._exchange, self._job(), self._config, target, self._emit, self._phase
        )
        self.service = opened.service
        return opened

    def _job(self) -> Job:
        coverage = self._coverage()
        layout = repr((self._topology.dense, self._topology.expert))
        digest = xxhash.xxh3_64_hexdigest(layout.encode())
        return Job(len(coverage.recipes), coverage.gaps(), self._config.job, digest)

    def take_in(self, told: Told, step: int) -> None:
        """Tell the gate of one replay; collective."""
        if self.service is None:
            return
        if told.retired:
            coverage = self._coverage()
            self.service.coverage_changed(len(coverage.recipes), coverage.gaps())
        if not told.completes and told.outcome in (Outcome.CLEAN, Outcome.STRAGGLER):
            return
        identities = [incident.id for incident in told.incidents]
        self.service.record(step, told.recipe, told.outcome, identities, told.proven_step)

    def answer(self, incident: Incident) -> Incident:
        """Say which checkpoint to restart from; the site's recovery takes note."""
        return answer(self._recovery or _Watching(), incident, self.service or _NoGate())

    def act(self, incident: Incident) -> None:
        """Let the site's recovery do what the incident asks for.

        Raises:
            SystemExit: the recovery ends this process.
        """
        if self._recovery is not None:
            act(self._recovery, incident)

    def close(self) -> None:
        """Wait for background work."""
        if self.service is not None:
            self.service.close()


class _NoGate:
    """No folder was opened: there is nothing to restart from."""

    def advise(self, failure: Failure) -> Choice:
        return Choice("none")

    def stop(self, failure: Failure) -> Choice:
        return Choice("none")


class _Watching:
    """No recovery is configured: look on."""

    def on_incident(self, incident: Incident) -> None:
        return None

    def choose_checkpoint(self, incident: Incident, choice: Choice) -> Choice:
        return choice

    def restart_in_place(self, incident: Incident) -> None:
        return None

    def replace_machine(self, incident: Incident) -> None:
        return None
