"""Runs the checks of one rank: what to record, what to replay, what the job is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from scout_core.config import ScoutConfig
from scout_core.decision import slow_partners
from scout_core.decision.expert_replay import Planned
from scout_core.decision.incident import Incident, Kind
from scout_core.decision.labels import Outcome
from scout_core.decision.narrate import place_of
from scout_core.decision.qualification import Qualification
from scout_core.decision.replay_verdict import AUDITED
from scout_core.decision.rotation import AUDIT, AUDIT_EXPERTS, EXPERT, OPTIMIZER, Rotation, Turn
from scout_core.decision.topology import LayoutName
from scout_core.evidence.clock import Clock
from scout_core.evidence.coherence import CoherenceWatch
from scout_core.evidence.exchange import Exchange
from scout_core.evidence.rest import RestWatch
from scout_core.integration.audit import Audit, signed
from scout_core.integration.check import Check, Result, WorkGroups
from scout_core.integration.experts import Experts
from scout_core.integration.framework import Framework, Site
from scout_core.integration.interpret import Interpreter, News
from scout_core.integration.job_facts import JobFacts, replayable
from scout_core.integration.subject import (
    AbsentSubject,
    ExpertSubject,
    ModuleSubject,
    OptimizerSubject,
    Subject,
)

LAYOUTS: tuple[LayoutName, ...] = ("dense", "expert")


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
    audit: str = ""
    """Name of the state audit that came with it; empty without one."""
    completes: bool = True
    """A clean outcome accepts the recipe; False for one of several replays that it needs."""
    proven_step: int | None = None
    """Last optimizer step that a clean outcome speaks for; None: all that were executed."""


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
        experts: Experts,
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
        self._rows = facts.topology.rows
        self._rest = RestWatch(lambda: signed(framework.state_units()))
        self._experts = experts
        self._subjects: list[Subject] = []
        self._known = Qualification()
        self._sites: dict[str, list[Site]] = {}
        for site in framework.sites():
            self._sites.setdefault(site.path_class, []).append(site)
        self._groups: dict[LayoutName, WorkGroups] = {}
        for name in facts.topology.layouts:
            self._groups[name] = WorkGroups(facts.topology, name, exchange.rank)
            self._groups[name].join(exchange)
        self.interpreter = Interpreter(facts.topology, facts.devices, config.kappa, clock.compares)
        """Judges results, and learns about times from them."""
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

    @property
    def recipes(self) -> tuple[str, ...]:
        """Recipes of one cycle, each of which the checkpoint gate wants accepted."""
        return tuple(n for each in self.rotation.recipes for n in self._experts.recipes(each))

    @property
    def cycle_checks(self) -> int:
        """Checks of one cycle, while no executed rows wait for a replay."""
        return max(self.rotation.cycle_checks, self._experts.cycle_checks(self.rotation.experts))

    def before_update(self, step: int) -> None:
        """Look at state at rest; called when nothing of this step is updated yet."""
        self._rest.look()
        if not self._watch.is_empty:
            self._watch.look(step)

    def arm(self) -> None:
        """Start recording: the end of the coming step has a check."""
        if not self.broken:
            self._subjects = [self._subject(turn) for turn in self._turns(self.checks)]
            self._rest.remember()

    def sweep(self, step: int, forward_backward: Callable[[], object]) -> Iterator[Told]:
        """Replay the whole catalogue now, but for the optimizer's update; collective.

        Args:
            forward_backward: runs one batch forward and backward, without an update; called once
                per turn. Gradients, random state and buffers are put back after each call.
        """
        swept: set[str] = set()
        self._experts.counting = False
        for check in range(self.rotation.cycle_checks):
            turns = [turn for turn in self._turns(check) if turn.recipe != OPTIMIZER]
            for turn, audited in zip(turns, self._audited(turns), strict=True):
                if turn.recipe in swept:
                    continue
                subject = self._subject(turn)
                with self._framework_untouched():
                    forward_backward()
                if self._experts.plans(turn.recipe):
                    swept.add(turn.recipe)
                    plan = self._experts.everything(turn.recipe, step)
                    yield from self._expert_turn(turn, plan, subject, step, audited, whole=True)
                else:
                    yield self._replay(turn, subject, step, audited)
                subject.close()

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
        self._experts.counting = True

    def run(self, step: int) -> Iterator[Told]:
        """Run the check that was armed, one recipe after the other."""
        self._experts.counting = False
        turns = self._turns(self.checks)
        # Arming failed when there are no subjects; the vote says so.
        subjects = self._subjects or [AbsentSubject() for _ in turns]
        self.checks += 1
        for turn, subject, audited in zip(turns, subjects, self._audited(turns), strict=True):
            if self._experts.plans(turn.recipe):
                called = isinstance(subject, ExpertSubject) and subject.was_called
                plan = iter(self._experts.plan(turn.recipe, called))
                yield from self._expert_turn(turn, plan, subject, step, audited)
            else:
                yield self._replay(turn, subject, step, audited)
            subject.close()
        self.let_go()

    def _turns(self, check: int) -> tuple[Turn, ...]:
        """Add a turn for the experts' state when none of them is replayed."""
        turns = self.rotation.turns(check)
        if "expert" in self._groups and not self.rotation.experts:
            turns += (Turn(AUDIT_EXPERTS, check, False),)
        return turns

    def _audited(self, turns: Sequence[Turn]) -> list[tuple[LayoutName, ...]]:
        """Return whose state comes with each turn: that of each layout with its first one."""
        left = ["dense", "expert"]
        audited: list[tuple[LayoutName, ...]] = []
        dense = any(self._layout_of(turn) == "dense" for turn in turns)
        for turn in turns:
            alone = not dense or "expert" not in self._groups
            own = {"dense", "expert"} if alone else {self._layout_of(turn)}
            audited.append(tuple(name for name in LAYOUTS if name in own and name in left))
            left = [name for name in left if name not in own]
        return audited

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
        if site.experts is not None:
            return ExpertSubject(self._framework, site, site.experts, self._clock, repeats)
        return ModuleSubject(self._framework, site, self._clock, repeats)

    def _layout_of(self, turn: Turn) -> LayoutName:
        """Return whose peers take part: the same on all ranks, also on those without a site."""
        experts = turn.recipe == AUDIT_EXPERTS or turn.path_class.startswith(EXPERT)
        return "expert" if experts and "expert" in self._groups else "dense"

    def _expert_turn(
        self,
        turn: Turn,
        plan: Iterator[Planned],
        subject: Subject,
        step: int,
        audited: tuple[LayoutName, ...],
        whole: bool = False,
    ) -> Iterator[Told]:
        """Replay the planned rows of one class, and say what that completes.

        Args:
            whole: the plan is everything that is due; it is not clean when it does not complete.
        """
        slots = self._config.experts.replays_per_check
        for number, planned in enumerate(plan):
            if turn.recipe not in self.rotation.recipes:
                return  # retired by a replay just now
            if isinstance(subject, ExpertSubject):
                subject.rows = planned.rows
            round_, timed = turn.round * slots + number, turn.timed and planned.completes
            each = Turn(planned.recipe, round_, timed, turn.recipe)
            told = self._replay(each, subject, step, audited if number == 0 else ())
            if told.retired:
                self._experts.retire(turn.recipe, planned)
            clean = told.outcome in (Outcome.CLEAN, Outcome.STRAGGLER)
            self._experts.on_result(turn.recipe, planned, step, clean)
            yield replace(told, completes=planned.completes)
        ended = self._experts.end(turn.recipe, step)
        if ended.lost:
            yield Told(ended.recipe, Outcome.INCONCLUSIVE, retired=ended.lost)
        elif ended.proven_step is not None:
            yield Told(ended.recipe, Outcome.CLEAN, proven_step=ended.proven_step)
        elif whole:
            yield Told(ended.recipe, Outcome.INCONCLUSIVE)

    def _replay(
        self, turn: Turn, subject: Subject, step: int, audited: tuple[LayoutName, ...]
    ) -> Told:
        layout = self._layout_of(turn)
        groups = self._groups[layout]
        units = self._framework.state_units
        audit = Audit(units, self._watch, self._rest, audited, step) if audited else None
        repeats, settle = self._config.confirm_repeats, self._framework.settle
        check = Check(self._exchange, groups, repeats, audit, settle)
        result = check.run(turn, step, subject, self._known, self.broken)
        if audited and result.entered:
            self._watch.clear()
        news = self._interpret(result, groups, layout)
        speaks = news.broken or self._exchange.rank == groups.work[0]
        told = check.share(news.to_wire() if speaks else b"", bool(speaks and news))
        return self._told(result, [News.from_wire(part) for part in told], audited)

    def _interpret(self, result: Result, groups: WorkGroups, layout: LayoutName) -> News:
        """Guarded apart, because peers wait for this rank's news even when it has a bug."""
        try:
            news = self.interpreter.news(result, groups, layout, self._known)
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

    def _told(self, result: Result, told: list[News], audited: tuple[LayoutName, ...]) -> Told:
        turn = result.turn
        factors = {rank: factor for news in told for rank, factor in news.factors.items()}
        found = [incident for news in told for incident in news.incidents]
        incidents = slow_partners.settle(found, factors, self._rows)
        retired = next((news.retire for news in told if news.retire), "")
        if retired and (not turn.of or any(news.of_class for news in told)):
            self.rotation = self.rotation.without(turn.path_class)
        audit = f"{AUDIT} of {' and '.join(audited)} state" if audited else ""
        looked_at = {turn.recipe, place_of(result.site, result.rows), audit or turn.recipe}
        return Told(
            turn.recipe,
            outcome_of(result, incidents, bool(retired)),
            incidents,
            frozenset(looked_at if result.entered else ()),
            tuple(remark for news in told for remark in news.remarks),
            retired,
            next((news.broken for news in told if news.broken), ""),
            audit,
            completes=turn.recipe != AUDIT_EXPERTS,
        )


def outcome_of(result: Result, incidents: tuple[Incident, ...], retired: bool) -> Outcome:
    """Say what a replay means for the checkpoints, job-wide."""
    kinds = {incident.kind for incident in incidents}
    if Kind.SDC in kinds:
        return Outcome.SDC
    if not result.entered or result.wild_anywhere or retired or Kind.NOT_COMPARABLE in kinds:
        return Outcome.INCONCLUSIVE
    return Outcome.STRAGGLER if Kind.STRAGGLER in kinds else Outcome.CLEAN


def shown_by(incident: Incident, told: Told) -> str:
    """Name what must look healthy before the fault counts as gone."""
    site = incident.evidence.get("site")
    if incident.reason in AUDITED or site is None:
        return told.audit or told.recipe
    if incident.kind in (Kind.SDC, Kind.NOT_COMPARABLE):
        return place_of(site, incident.evidence.get("rows", ()))
    return told.recipe
