"""One session per rank and model: the guard around every hook, and what the user sees."""

from __future__ import annotations

import atexit
import functools
import os
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

from scout_core.config import ScoutConfig
from scout_core.decision import rotation
from scout_core.decision.incident import Incident
from scout_core.decision.labels import Outcome
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo
from scout_core.evidence.clock import Clock, clock_for
from scout_core.evidence.coherence import CoherenceWatch
from scout_core.evidence.exchange import Exchange
from scout_core.integration import expert_facts, job_facts
from scout_core.integration.checker import Checker, Told, shown_by
from scout_core.integration.checkpoint import GatedCheckpoint, Manager
from scout_core.integration.experts import Experts
from scout_core.integration.framework import Framework
from scout_core.integration.gate_service import GateService
from scout_core.integration.hang_watch import HangWatch
from scout_core.integration.ledger import Ledger
from scout_core.integration.looks import Look, open_looks
from scout_core.integration.probe import PROBE
from scout_core.integration.recovery import load_recovery
from scout_core.integration.rule_memory import RuleMemory
from scout_core.integration.session_coverage import SessionCoverage
from scout_core.integration.session_gate import SessionGate
from scout_core.report.events import RunDir

Callback = Callable[[Incident], None]


class Session:
    """Attached SCOUT. Made by `enable_resiliency`; all ranks make it together.

    Every hook is guarded: an exception of SCOUT ends in one event and in SCOUT switched off on all
    ranks, never in the training step.
    """

    def __init__(
        self,
        framework: Framework,
        config: ScoutConfig,
        exchange: Exchange,
        run_dir: RunDir,
        console: Callable[[str], None],
        fault_callback: Callback | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Find out who the peers are and start counting steps; a collective call.

        Args:
            console: prints one line; used on rank 0 only.
        """
        self._config = config
        self._exchange = exchange
        self._run_dir = run_dir
        self._console = console
        self._callback = fault_callback
        self._clock = clock or clock_for(framework.device)
        self._armed = True
        self._closed = False
        self._at_exit = functools.partial(_say_end, weakref.ref(self))
        atexit.register(self._at_exit)
        self._in_check = False
        self._steps = 0
        self.hang: HangWatch | None = None
        """The out-of-band observer, when this session started it."""
        self._ledger = Ledger(self._on_incident)
        watch = CoherenceWatch(framework.master_pairs)
        facts = job_facts.learn(framework, exchange, watch.gaps())
        classes = expert_facts.learn(framework, config.experts, facts.topology, exchange)
        facts = expert_facts.without_uncovered(facts, classes)
        self._topology = facts.topology
        self._not_covered = list(facts.not_covered)
        sites, step_now = framework.sites(), lambda: self._steps + 1
        self._experts = Experts(sites, classes, exchange, self._note, step_now)
        self._checker = Checker(
            framework, config, exchange, self._clock, watch, facts, self._experts, self._note
        )
        self._target = framework.training_state()
        self._checkpoint: GatedCheckpoint | None = None
        recovery = load_recovery(config.recovery, exchange.rank, console)
        self._gate = SessionGate(
            exchange, config, facts.topology, self.coverage, self._emit, self.phase, recovery
        )
        slow_ranks = functools.partial(self._ledger.slow_ranks, shown_by_other_than=PROBE)
        self._looks = open_looks(framework, facts, exchange, self._clock, config, slow_ranks)
        learners = [self._checker.interpreter, *self._looks]
        self._memory = RuleMemory(run_dir.path, exchange, facts, learners, self._emit)
        self._undo: list[Undo] = [
            framework.before_update(self._guarded(self._before_update)),
            framework.on_step_end(self._guarded(self._after_step)),
        ]
        self._say(f"scout: {framework.name}, {self.coverage().line()}")
        if rotation.is_due(1, config.interval_steps):
            self._guarded(self._checker.arm)()

    @property
    def step_count(self) -> int:
        """Optimizer steps since the session began."""
        return self._steps

    @property
    def check_count(self) -> int:
        """Checks since the session began."""
        return self._checker.checks

    @property
    def qualified(self) -> frozenset[str]:
        """Recipes that proved reproducible, so that they are compared exactly."""
        return self._checker.qualified

    @property
    def armed(self) -> bool:
        """False after an internal error switched SCOUT off."""
        return self._armed

    @property
    def topology(self) -> Topology:
        """Addresses and hosts of the job."""
        return self._topology

    def coverage(self) -> SessionCoverage:
        """Say what can be attributed, only detected, or not seen, and why."""
        found = self._topology.coverage()
        return SessionCoverage(
            found.groups,
            found.state_groups,
            self._checker.recipes,
            tuple(self._not_covered),
            self._config.interval_steps * self._checker.cycle_checks,
            self._clock.compares,
            self._experts.coverage(),
        )

    def incidents(self) -> list[Incident]:
        """All incidents so far, oldest first; equal on all ranks."""
        return self._ledger.incidents

    @property
    def has_open_fault(self) -> bool:
        """A reported fault has not been seen healthy since; equal on all ranks."""
        return bool(self._ledger.open)

    def checkpoint(self, place: str | os.PathLike[str] | Manager) -> GatedCheckpoint:
        """Save and restore through the gate (Algorithm 3); collective, and the same after that.

        Raises:
            ScoutError: the framework writes its own checkpoints, or the folder's record is corrupt.
        """
        if self._checkpoint is None:
            if self._target is None:
                raise ScoutError("this framework writes its own checkpoints; they are gated there")
            self._checkpoint = self._gate.checkpoint(place, self._target)
        return self._checkpoint

    def open_gate(self, folder: str | os.PathLike[str]) -> GateService:
        """Open the gate for checkpoints that a framework writes; collective, used by adapters."""
        return self._gate.open(folder)

    def restore(self, failure: str | None = None, **options: Any) -> int:
        """Load what the evidence allows and go on from there; returns the step, 0 for a new run.

        Arguments as in `GatedCheckpoint.restore`; all ranks call it, after `checkpoint(folder)`.

        Raises:
            ScoutError: no folder was opened, or nothing in it can be trusted.
        """
        if self._checkpoint is None:
            raise ScoutError("session.restore() needs a folder: call session.checkpoint(folder)")
        self.resume_at(self._checkpoint.restore(failure, **options))
        return self._steps

    def resume_at(self, step: int) -> None:
        """Count optimizer steps from here on; called on all ranks when a checkpoint was loaded."""
        self._steps = step
        self._checker.let_go()
        if self._armed and rotation.is_due(step + 1, self._config.interval_steps):
            self._guarded(self._checker.arm)()

    def full_sweep(self, forward_backward: Callable[[], object]) -> bool:
        """Replay the whole catalogue now, and tell whether it was clean, job-wide; collective.

        Args:
            forward_backward: runs one batch forward and backward, without an update.
        """
        clean = self._armed
        for told in self._checker.sweep(self._steps, forward_backward) if self._armed else ():
            self._take_in(told)
            clean = clean and told.outcome in (Outcome.CLEAN, Outcome.STRAGGLER)
        self.resume_at(self._steps)
        return clean

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Publish that a block is "evaluation", "checkpoint", "data" or "idle", not a step.

        Each phase has a time limit of its own before it counts as a hang.

        Raises:
            ScoutError: there is no such phase.
        """
        return nullcontext() if self.hang is None else self.hang.phase(name)

    def pause(self) -> None:
        """Say that the job is idle on purpose, until `resume`."""
        if self.hang is not None:
            self.hang.pause()

    def resume(self) -> None:
        """End the last `pause`."""
        if self.hang is not None:
            self.hang.resume()

    def note(self, event: str, **fields: Any) -> None:
        """Write one event of an adapter's; rank 0 does."""
        self._emit(event, **fields)

    def at_close(self, undo: Undo) -> None:
        """Take this away, too, when the session is closed; the last one comes first."""
        self._undo.append(undo)

    def close(self, planned: bool = True) -> None:
        """Take every hook away and give SCOUT's groups back; training can go on.

        Args:
            planned: the job ends as it should, so that its next start goes on from the latest
                checkpoint; collective then, if a folder of checkpoints is open.
        """
        if self._closed:
            return
        self._closed = True
        if self._checkpoint is not None:
            self._guarded(functools.partial(self._checkpoint.close, planned))()
        self._checker.let_go()
        self._memory.save()
        for undo in reversed(self._undo):
            undo()
        self._experts.close()
        for look in self._looks:
            look.close()
        if self.hang is not None:
            self.hang.close()
        self._gate.close()
        self._exchange.close()
        self.say_end()

    def say_end(self) -> None:
        """Print the line of the end; done by `close`, or when the process ends without it."""
        atexit.unregister(self._at_exit)
        state = "" if self._armed else " (switched off after an internal error)"
        experts = "".join(f"; {each.line()}" for each in self._experts.coverage())
        self._say(
            f"scout: {self._checker.checks} checks in {self._steps} steps, "
            f"{len(self._ledger.incidents)} incident(s){state}{experts}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self.hang is not None:
            self.hang.fail(error)
        self.close(planned=error is None)

    def _before_update(self) -> None:
        if self._armed:
            self._checker.before_update(self._steps)

    def _after_step(self) -> None:
        self._steps += 1
        if self._armed and rotation.is_due(self._steps, self._config.interval_steps):
            self._check()
        for look in self._looks:
            if self._armed:
                self._look(look)
        if self._armed and rotation.is_due(self._steps + 1, self._config.interval_steps):
            self._checker.arm()
        if self.hang is not None:
            self.hang.step(self._steps)

    def _check(self) -> None:
        self._in_check = True
        for told in self._checker.run(self._steps):
            self._take_in(told)
            if not self._armed:
                break
        self._in_check = False
        self._memory.on_check()

    def _look(self, look: Look) -> None:
        self._in_check = True
        told = look.on_step_end(self._steps)
        self._in_check = False
        if told is not None:
            self._take_in(told)

    def _take_in(self, told: Told) -> None:
        """Act on what the job knows now; every rank has the same."""
        self._gate.take_in(told, self._steps)
        for key in self._ledger.clear(told.looked_at, told.incidents):
            self._emit("cleared", kind=key[0], ranks=list(key[1] or key[2]))
        for incident in told.incidents:
            self._ledger.record(incident, shown_by(incident, told))
        for remark in told.remarks:
            self._emit("remark", recipe=told.recipe, text=remark)
        if told.retired:
            self._not_covered.append(f"{told.recipe}: {told.retired}")
            self._emit("not_covered", recipe=told.recipe, why=told.retired)
            self._say(f"scout: {told.recipe} is not covered from now on: {told.retired}")
        if told.broken:
            self._disarm(told.broken)

    def _on_incident(self, incident: Incident) -> Incident:
        """Report a new fault, and add which checkpoint to restart from."""
        known = [incident]
        self._call_out("recovery_failed", lambda: known.append(self._gate.answer(incident)))
        incident = known[-1]
        if self._exchange.rank == 0:
            self._run_dir.report(incident)
            self._console(f"scout: {incident.kind.value}: {incident.message}")
        if self._callback is not None:
            self._call_out("callback_failed", functools.partial(self._callback, incident))
        self._call_out("recovery_failed", functools.partial(self._gate.act, incident))
        return incident

    def _call_out(self, event: str, work: Callable[[], object]) -> None:
        """Guard of the user's and the site's code: an exception is an event, SystemExit goes on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 -- guard: code that is not SCOUT's
            self._emit(event, everywhere=True, error=repr(error))

    def _guarded(self, hook: Callable[[], None]) -> Callable[[], None]:
        """The guard at the boundary to training: nothing raises through it."""

        def guarded() -> None:
            try:
                hook()
            except Exception as error:
                if self._config.on_error == "raise":
                    raise
                self._fail(error)

        return guarded

    def _fail(self, error: Exception) -> None:
        """Take in an error that came through a hook.

        Inside a check only a collective can have raised: the peers see theirs fail too, so each
        rank switches off by itself. Anywhere else the peers learn of it at the next vote.
        """
        self._note(error)
        if self._in_check:
            self._disarm(self._checker.broken)

    def _note(self, error: Exception) -> None:
        self._checker.broken = f"{type(error).__name__}: {error}"[:500]
        trace = traceback.format_exc(limit=8)
        self._emit("internal_error", everywhere=True, error=self._checker.broken, trace=trace)

    def _disarm(self, why: str) -> None:
        self._armed = False
        self._checker.let_go()
        for look in self._looks:
            look.close()
        self._emit("disarmed", error=why)
        self._say(f"scout: switched off on all ranks after an internal error: {why}")

    def _emit(self, event: str, everywhere: bool = False, **fields: Any) -> None:
        if everywhere or self._exchange.rank == 0:
            self._run_dir.emit(event, rank=self._exchange.rank, step=self._steps, **fields)

    def _say(self, line: str) -> None:
        if self._exchange.rank == 0:
            self._console(line)


def _say_end(session: weakref.ref[Session]) -> None:
    living = session()
    if living is not None:
        living.say_end()
