"""One session per rank and model: when to check, what to arm, and the guard around every hook."""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from scout_core.config import ScoutConfig
from scout_core.decision import rotation
from scout_core.decision.incident import Incident, Kind
from scout_core.decision.qualification import Qualification
from scout_core.decision.replay_verdict import AUDITED
from scout_core.decision.rotation import AUDIT, OPTIMIZER, Rotation, Turn
from scout_core.decision.straggler import StragglerRule
from scout_core.decision.topology import LayoutName, Topology
from scout_core.evidence.capture import Undo
from scout_core.evidence.clock import Clock, clock_for
from scout_core.evidence.coherence import CoherenceWatch
from scout_core.evidence.exchange import Exchange
from scout_core.evidence.rest import RestWatch
from scout_core.integration.audit import Audit, signed
from scout_core.integration.check import Check, Result, WorkGroups
from scout_core.integration.framework import Framework, Site
from scout_core.integration.interpret import Interpreter, News
from scout_core.integration.ledger import Ledger
from scout_core.integration.session_coverage import SessionCoverage
from scout_core.integration.subject import (
    AbsentSubject,
    ModuleSubject,
    OptimizerSubject,
    Subject,
)
from scout_core.report.events import RunDir

Callback = Callable[[Incident], None]


class Session:
    """Attached SCOUT. Made by `enable_resiliency`; all ranks make it together.

    Every hook is guarded: an exception of SCOUT ends in one event and in SCOUT switched off on all
    ranks, never in the training step (DESIGN rules 5.1 and 5.4).
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
        self._framework = framework
        self._config = config
        self._exchange = exchange
        self._run_dir = run_dir
        self._console = console
        self._callback = fault_callback
        self._clock = clock or clock_for(framework.device)
        self._undo: list[Undo] = []
        self._subjects: list[Subject] = []
        self._broken = ""
        self._armed = True
        self._closed = False
        self._in_check = False
        self._checks = 0
        self._steps = 0
        self._known = Qualification()
        self._ledger = Ledger(self._on_incident)
        self._watch = CoherenceWatch(framework.master_pairs)
        self._learn_the_job()
        self._rest = RestWatch(lambda: signed(framework.state_units()))
        self._undo.append(framework.before_update(self._guarded(self._look)))
        self._undo.append(framework.on_step_end(self._guarded(self._after_step)))
        self._say(f"scout: {framework.name}, {self.coverage().line()}")
        if rotation.is_due(1, config.interval_steps):
            self._guarded(self._arm)()

    @property
    def step_count(self) -> int:
        """Optimizer steps since the session began."""
        return self._steps

    @property
    def check_count(self) -> int:
        """Checks since the session began."""
        return self._checks

    @property
    def qualified(self) -> frozenset[str]:
        """Recipes that proved reproducible, so that they are compared exactly."""
        return self._known.recipes

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
            self._rotation.recipes,
            tuple(self._not_covered),
            self._config.interval_steps * self._rotation.cycle_checks,
            self._clock.compares,
        )

    def incidents(self) -> list[Incident]:
        """All incidents so far, oldest first; equal on all ranks."""
        return self._ledger.incidents

    @property
    def has_open_fault(self) -> bool:
        """A reported fault has not been seen healthy since; equal on all ranks."""
        return bool(self._ledger.open)

    def close(self) -> None:
        """Take every hook away and give SCOUT's groups back; training can go on."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        for undo in reversed(self._undo):
            undo()
        self._exchange.close()
        state = "" if self._armed else " (switched off after an internal error)"
        self._say(
            f"scout: {self._checks} checks in {self._steps} steps, "
            f"{len(self._ledger.incidents)} incident(s){state}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _learn_the_job(self) -> None:
        """Gather what each rank can replay, its host and device; join the groups."""
        sites = [*self._framework.sites()]
        mine = {
            "host": socket.gethostname(),
            "device": _device_name(self._framework.device),
            "recipes": self._local_recipes(sites),
            "missing": [
                *self._framework.uncovered(),
                *self._optimizer_gaps(),
                *self._watch.gaps(),
            ],
        }
        everyone = tuple(range(self._exchange.world_size))
        gathered = self._exchange.all_gather(json.dumps(mine).encode(), everyone)
        told: list[dict[str, Any]] = [json.loads(part) for part in gathered]
        layout = self._framework.topology()
        hosts = tuple(each["host"] for each in told)
        self._topology = replace(layout, hosts=hosts) if not any(layout.hosts) else layout
        self._rotation: Rotation = rotation.merge([each["recipes"] for each in told])
        self._not_covered = list(dict.fromkeys(gap for each in told for gap in each["missing"]))
        self._sites: dict[str, list[Site]] = {}
        for site in sites:
            self._sites.setdefault(site.path_class, []).append(site)
        self._groups: dict[LayoutName, WorkGroups] = {}
        for name in self._topology.layouts:
            self._groups[name] = WorkGroups(self._topology, name, self._exchange.rank)
            self._groups[name].join(self._exchange)
        self._interpreter = Interpreter(
            self._topology,
            {rank: each["device"] for rank, each in enumerate(told)},
            StragglerRule(kappa=self._config.kappa),
            self._clock.compares,
        )

    def _local_recipes(self, sites: Sequence[Site]) -> list[str]:
        names = list(dict.fromkeys(site.path_class for site in sites))
        if self._able():
            names.append(OPTIMIZER)
        return names

    def _optimizer_gaps(self) -> list[str]:
        return [
            f"updates of {type(optimizer).__name__} cannot be replayed on a slice"
            for optimizer in self._framework.optimizers()
            if not self._framework.is_elementwise(optimizer)
        ]

    def _able(self) -> list[torch.optim.Optimizer]:
        """Optimizers whose updates can be replayed."""
        framework = self._framework
        return [each for each in framework.optimizers() if framework.is_elementwise(each)]

    def _after_step(self) -> None:
        self._steps += 1
        if self._armed and rotation.is_due(self._steps, self._config.interval_steps):
            self._check()
        if self._armed and rotation.is_due(self._steps + 1, self._config.interval_steps):
            self._arm()

    def _look(self) -> None:
        if self._armed:
            self._rest.look()
            if not self._watch.is_empty:
                self._watch.look(self._steps)

    def _arm(self) -> None:
        """Start recording: the end of the coming step has a check."""
        if not self._broken:
            turns = self._rotation.turns(self._checks)
            self._subjects = [self._make_subject(turn) for turn in turns]
            self._rest.remember()

    def _let_go(self) -> None:
        for subject in self._subjects:
            subject.close()
        self._subjects = []

    def _make_subject(self, turn: Turn) -> Subject:
        if turn.recipe == OPTIMIZER:
            able = self._able()
            if able:
                rounds, index = divmod(turn.round, len(able))
                most = self._config.optimizer_slice_elements
                return OptimizerSubject(able[index], rounds, most)
        sites = self._sites.get(turn.recipe, [])
        if not sites:
            return AbsentSubject()
        site = sites[turn.round % len(sites)]
        repeats = max(2, self._config.timing_repeats if turn.timed else 0)
        return ModuleSubject(self._framework, site, self._clock, repeats)

    def _layout_of(self, turn: Turn) -> LayoutName:
        sites = self._sites.get(turn.recipe, [])
        name: LayoutName = sites[0].layout if sites else "dense"
        return name if name in self._groups else "dense"

    def _check(self) -> None:
        turns = self._rotation.turns(self._checks)
        # Arming failed when there are no subjects; the vote says so.
        subjects = self._subjects or [AbsentSubject() for _ in turns]
        self._in_check = True
        for turn, subject in zip(turns, subjects, strict=True):
            if self._armed:
                self._replay(turn, subject, audits=turn is turns[0])
        self._in_check = False
        self._let_go()
        self._checks += 1

    def _replay(self, turn: Turn, subject: Subject, audits: bool) -> None:
        layout = self._layout_of(turn)
        groups = self._groups[layout]
        repeats, units = self._config.confirm_repeats, self._framework.state_units
        audit = Audit(units, self._watch, self._rest, layout, self._steps) if audits else None
        check = Check(self._exchange, groups, repeats, audit)
        result = check.run(turn, self._steps, subject, self._known, self._broken)
        subject.close()
        if audits and result.entered:
            self._watch.clear()
        news = self._interpret(result, groups, layout)
        speaks = news.broken or self._exchange.rank == groups.work[0]
        told = check.share(news.to_wire() if speaks and news else b"")
        self._take_in([News.from_wire(part) for part in told], result, audits)

    def _interpret(self, result: Result, groups: WorkGroups, layout: LayoutName) -> News:
        """Guarded apart, because peers wait for this rank's news even when it has a bug."""
        try:
            news = self._interpreter.news(result, groups, layout, self._known)
        except Exception as error:
            if self._config.on_error == "raise":
                raise
            self._note(error)
            return News(broken=self._broken)
        if result.entered:
            self._known = result.known
            if not news.retire:
                self._known = self._known.with_recipe(result.turn.recipe)
        return news.stamped(self._config.job)

    def _take_in(self, told: Sequence[News], result: Result, audit: bool) -> None:
        """Act on the job's news; every rank has the same."""
        turn = result.turn
        incidents = [incident for news in told for incident in news.incidents]
        if result.entered:
            looked_at = frozenset([turn.recipe, result.site, AUDIT if audit else turn.recipe])
            for key in self._ledger.clear(looked_at, incidents):
                self._emit("cleared", kind=key[0], ranks=list(key[1] or key[2]))
        for incident in incidents:
            self._ledger.record(incident, _shown_by(incident, turn.recipe))
        for news in told:
            for remark in news.remarks:
                self._emit("remark", recipe=turn.recipe, text=remark)
        retired = next((news.retire for news in told if news.retire), "")
        if retired:
            self._rotation = self._rotation.without(turn.recipe)
            self._not_covered.append(f"{turn.recipe}: {retired}")
            self._emit("not_covered", recipe=turn.recipe, why=retired)
            self._say(f"scout: {turn.recipe} is not covered from now on: {retired}")
        broken = next((news.broken for news in told if news.broken), "")
        if broken:
            self._disarm(broken)

    def _on_incident(self, incident: Incident) -> None:
        if self._exchange.rank == 0:
            self._run_dir.report(incident)
            self._console(f"scout: {incident.kind.value}: {incident.message}")
        if self._callback is not None:
            try:
                self._callback(incident)
            except Exception as error:  # noqa: BLE001 -- guard: a user's callback
                self._emit("callback_failed", everywhere=True, error=repr(error))

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
            self._disarm(self._broken)

    def _note(self, error: Exception) -> None:
        self._broken = f"{type(error).__name__}: {error}"[:500]
        trace = traceback.format_exc(limit=8)
        self._emit("internal_error", everywhere=True, error=self._broken, trace=trace)

    def _disarm(self, why: str) -> None:
        self._armed = False
        self._let_go()
        self._emit("disarmed", error=why)
        self._say(f"scout: switched off on all ranks after an internal error: {why}")

    def _emit(self, event: str, everywhere: bool = False, **fields: Any) -> None:
        if everywhere or self._exchange.rank == 0:
            self._run_dir.emit(event, rank=self._exchange.rank, step=self._steps, **fields)

    def _say(self, line: str) -> None:
        if self._exchange.rank == 0:
            self._console(line)


def _shown_by(incident: Incident, recipe: str) -> str:
    """Name what must look healthy before the fault counts as gone."""
    if incident.reason in AUDITED:
        return AUDIT
    if incident.kind in (Kind.SDC, Kind.NOT_COMPARABLE):
        return str(incident.evidence.get("site", AUDIT))
    return recipe


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def print_line(line: str) -> None:
    """Print to stderr at once; never raises, even when the stream is closed."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return
