"""Runs the checks of one rank: what to record, what to replay, what the job is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from scout_core.config import ScoutConfig
from scout_core.decision.incident import Incident, Kind
from scout_core.decision.labels import Outcome
from scout_core.decision.qualification import Qualification
from scout_core.decision.replay_verdict import AUDITED
from scout_core.decision.rotation import AUDIT, OPTIMIZER, Rotation, Turn
from scout_core.decision.straggler import StragglerRule
from scout_core.decision.topology import LayoutName
from scout_core.evidence.clock import Clock
from scout_core.evidence.coherence import CoherenceWatch
from scout_core.evidence.exchange import Exchange
from scout_core.evidence.rest import RestWatch
from scout_core.integration.audit import Audit, signed
from scout_core.integration.check import Check, Result, WorkGroups
from scout_core.integration.framework import Framework, Site
from scout_core.integration.interpret import Interpreter, News
from scout_core.integration.job_facts import JobFacts, replayable
from scout_core.integration.subject import AbsentSubject, ModuleSubject, OptimizerSubject, Subject


@dataclass(frozen=True)
class Told:
    """What the whole job knows after one replay; equal on all ranks."""

    recipe: str
    outcome: Outcome
    incidents: tuple[Incident, ...] = ()
    looked_at: frozenset[str] = frozenset()
    """What was seen well enough to clear an earlier fault of it; see `shown_by`."""
    remarks: tuple[str, ...] = ()
    retired: str = ""
    """Why this recipe is not replayed any more."""
    broken: str = ""
    """An internal error of some rank: SCOUT must be switched off."""


class Checker:
    """Arms one step before a check and runs it; all ranks call it in the same order.

    An exception of a collective comes through; everything else is told to the peers.
    """

    def __init__(
        self,
        framework: Framework,
        config: ScoutConfig,
        exchange: Exchange,
        clock: Clock,
        watch: CoherenceWatch,
        facts: JobFacts,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Join the groups of this rank; collective.

        Args:
            on_error: logs an internal error and sets `broken`, so that the peers are told.
        """
        self._framework = framework
        self._config = config
        self._exchange = exchange
        self._clock = clock
        self._watch = watch
        self._on_error = on_error
        self._rest = RestWatch(lambda: signed(framework.state_units()))
        self._subjects: list[Subject] = []
        self._known = Qualification()
        self._sites: dict[str, list[Site]] = {}
        for site in framework.sites():
            self._sites.setdefault(site.path_class, []).append(site)
        self._groups: dict[LayoutName, WorkGroups] = {}
        for name in facts.topology.layouts:
            self._groups[name] = WorkGroups(facts.topology, name, exchange.rank)
            self._groups[name].join(exchange)
        rule = StragglerRule(kappa=config.kappa)
        self._interpreter = Interpreter(facts.topology, facts.devices, rule, clock.compares)
        self.rotation: Rotation = facts.rotation
        """Recipes that still take turns."""
        self.checks = 0
        """Checks that were run."""
        self.broken = ""
        """An internal error of this rank, to be told at the next vote."""

    @property
    def qualified(self) -> frozenset[str]:
        """Recipes that proved reproducible, so that they are compared exactly."""
        return self._known.recipes

    def before_update(self, step: int) -> None:
        """Look at state at rest; called when nothing of this step is updated yet."""
        self._rest.look()
        if not self._watch.is_empty:
            self._watch.look(step)

    def arm(self) -> None:
        """Start recording: the end of the coming step has a check."""
        if not self.broken:
            self._subjects = [self._subject(turn) for turn in self.rotation.turns(self.checks)]
            self._rest.remember()

    def sweep(self, step: int, forward_backward: Callable[[], object]) -> Iterator[Told]:
        """Replay the whole catalogue now, but for the optimizer's update; collective.

        Args:
            forward_backward: runs one batch forward and backward, without an update; called once
                per turn. Gradients, random state and buffers are put back after each call.
        """
        for check in range(self.rotation.cycle_checks):
            turns = [t for t in self.rotation.turns(check) if t.recipe != OPTIMIZER]
            for turn in turns:
                subject = self._subject(turn)
                with self._framework_untouched():
                    forward_backward()
                yield self._replay(turn, subject, step, audits=turn is turns[0])

    @contextlib.contextmanager
    def _framework_untouched(self) -> Iterator[None]:
        """Leave generators, buffers and gradients as they were."""
        framework = self._framework
        rng = framework.get_rng()
        buffers = {b: b.clone() for site in framework.sites() for b in site.module.buffers()}
        yield
        for optimizer in framework.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        framework.set_rng(rng)

    def let_go(self) -> None:
        """Stop recording and forget what was captured."""
        for subject in self._subjects:
            subject.close()
        self._subjects = []

    def run(self, step: int) -> Iterator[Told]:
        """Run the check that was armed, one recipe after the other."""
        turns = self.rotation.turns(self.checks)
        # Arming failed when there are no subjects; the vote says so.
        subjects = self._subjects or [AbsentSubject() for _ in turns]
        self.checks += 1
        for turn, subject in zip(turns, subjects, strict=True):
            yield self._replay(turn, subject, step, audits=turn is turns[0])
        self.let_go()

    def _subject(self, turn: Turn) -> Subject:
        able = replayable(self._framework)
        if turn.recipe == OPTIMIZER and able:
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

    def _replay(self, turn: Turn, subject: Subject, step: int, audits: bool) -> Told:
        layout = self._layout_of(turn)
        groups = self._groups[layout]
        units = self._framework.state_units
        audit = Audit(units, self._watch, self._rest, layout, step) if audits else None
        repeats, settle = self._config.confirm_repeats, self._framework.settle
        check = Check(self._exchange, groups, repeats, audit, settle)
        result = check.run(turn, step, subject, self._known, self.broken)
        subject.close()
        if audits and result.entered:
            self._watch.clear()
        news = self._interpret(result, groups, layout)
        speaks = news.broken or self._exchange.rank == groups.work[0]
        told = check.share(news.to_wire() if speaks and news else b"")
        return self._told(result, [News.from_wire(part) for part in told], audits)

    def _interpret(self, result: Result, groups: WorkGroups, layout: LayoutName) -> News:
        """Guarded apart, because peers wait for this rank's news even when it has a bug."""
        try:
            news = self._interpreter.news(result, groups, layout, self._known)
        except Exception as error:
            if self._config.on_error == "raise":
                raise
            self._on_error(error)
            return News(broken=self.broken)
        if result.entered:
            self._known = result.known
            if not news.retire:
                self._known = self._known.with_recipe(result.turn.recipe)
        return news.stamped(self._config.job)

    def _told(self, result: Result, told: list[News], audited: bool) -> Told:
        recipe = result.turn.recipe
        incidents = tuple(incident for news in told for incident in news.incidents)
        retired = next((news.retire for news in told if news.retire), "")
        if retired:
            self.rotation = self.rotation.without(recipe)
        looked_at = {recipe, result.site, AUDIT if audited else recipe}
        return Told(
            recipe,
            outcome_of(result, incidents, bool(retired)),
            incidents,
            frozenset(looked_at if result.entered else ()),
            tuple(remark for news in told for remark in news.remarks),
            retired,
            next((news.broken for news in told if news.broken), ""),
        )


def outcome_of(result: Result, incidents: tuple[Incident, ...], retired: bool) -> Outcome:
    """Say what a replay means for the checkpoints, job-wide."""
    kinds = {incident.kind for incident in incidents}
    if Kind.SDC in kinds:
        return Outcome.SDC
    if not result.entered or result.wild_anywhere or retired or Kind.NOT_COMPARABLE in kinds:
        return Outcome.INCONCLUSIVE
    return Outcome.STRAGGLER if Kind.STRAGGLER in kinds else Outcome.CLEAN


def shown_by(incident: Incident, recipe: str) -> str:
    """Name what must look healthy before the fault counts as gone."""
    if incident.reason in AUDITED:
        return AUDIT
    if incident.kind in (Kind.SDC, Kind.NOT_COMPARABLE):
        return str(incident.evidence.get("site", AUDIT))
    return recipe
