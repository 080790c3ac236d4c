"""The expert stages of one rank: what they execute is logged, and what to replay is agreed.

Every rank of the job takes part in the agreement, also one that has no expert stage, because all
ranks enter a check together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scout_core.decision.catalog import Shape
from scout_core.decision.catalog_file import shape_from_json
from scout_core.decision.expert_replay import ExpertReplays, Planned
from scout_core.evidence.capture import Undo, before_calls
from scout_core.evidence.exchange import Exchange
from scout_core.evidence.row_log import RowLog
from scout_core.integration.expert_calls import ExpertCalls
from scout_core.integration.expert_facts import ExpertClass
from scout_core.integration.framework import Site
from scout_core.integration.session_coverage import ExpertCoverage

MOST_TOLD = 8  # shapes that one rank asks for at one check


@dataclass(frozen=True)
class Ended:
    """How the cycle of a class stands after a check; equal on all ranks."""

    recipe: str
    """Of the executed rows."""
    proven_step: int | None = None
    """Last step whose executed rows the finished cycle proves; None while it is under way."""
    lost: str = ""
    """Why no cycle can prove executed rows; the recipe is retired."""


class Experts:
    """Logs the calls of all expert stages of this rank and plans their replays with the others."""

    def __init__(
        self,
        sites: Sequence[Site],
        classes: Mapping[str, ExpertClass],
        exchange: Exchange,
        on_error: Callable[[Exception], None],
        step_now: Callable[[], int],
    ) -> None:
        """Watch the sites whose executed rows count; local.

        Args:
            classes: by path class, of all ranks of the job.
            on_error: logs an internal error, which the next vote tells the peers.
            step_now: number of the optimizer step under way, from 1.
        """
        self._exchange = exchange
        self._everyone = tuple(range(exchange.world_size))
        self._on_error = on_error
        self._step_now = step_now
        self._classes = dict(classes)
        self._uncounted: dict[str, str] = {}  # path class -> why its executed rows are not known
        self._given_up: set[str] = set()  # the same, known to all ranks
        self._logs: dict[str, RowLog] = {}
        self._undo: list[Undo] = []
        self.counting = True
        """False while SCOUT itself calls modules."""
        for site in sites:
            if site.experts is not None and self.plans(site.path_class):
                size = site.experts.kernels.num_experts
                log = self._logs.setdefault(site.path_class, RowLog(size))
                self._undo.append(before_calls(site.module, self._logged(log, site.experts)))

    def plans(self, recipe: str) -> bool:
        """Tell whether replays of this path class are planned, not those of sampled calls."""
        found = self._classes.get(recipe)
        return found is not None and found.replays is not None

    def recipes(self, recipe: str) -> tuple[str, ...]:
        """Return what the checkpoint gate counts for one path class."""
        if not self.plans(recipe):
            return (recipe,)
        names = self._replays(recipe).recipes
        return tuple(n for n in names if recipe not in self._given_up or n != names[-1])

    def cycle_checks(self, recipes: Sequence[str]) -> int:
        """Return the checks of one cycle of these path classes, which take turns."""
        planned = [self._replays(r).cycle_checks for r in recipes if self.plans(r)]
        return len(recipes) * max(planned, default=1)

    def coverage(self) -> tuple[ExpertCoverage, ...]:
        """Say for each class what its replays cover."""
        return tuple(self._coverage(name, each) for name, each in self._classes.items())

    def plan(self, recipe: str, was_called: bool) -> tuple[Planned, ...]:
        """Agree on the replays of one class at this check; collective over the job.

        Args:
            was_called: a stage of it was called on this rank in the sampled step.
        """
        mine: tuple[Shape, ...] = ()
        try:
            mine = self._take_in(recipe, was_called)
        except Exception as error:  # noqa: BLE001 -- guard: peers wait for this rank's queue
            self._on_error(error)
        if not any(self._exchange.all_reduce_max([bool(mine)])):
            return self._replays(recipe).plan(())
        payload = json.dumps(mine).encode()
        told = self._exchange.all_gather(payload, self._everyone)
        queues = [[shape_from_json(shape) for shape in json.loads(part)] for part in told]
        return self._replays(recipe).plan(queues)

    def everything(self, recipe: str, step: int) -> Iterator[Planned]:
        """Plan until each representative, and all that waits, has been replayed; collective.

        Ends before that when replays keep coming to nothing.
        """
        replays = self._replays(recipe)
        replays.begin_sweep(step)
        for _ in range(2 * replays.cycle_checks + MOST_TOLD):
            yield from self.plan(recipe, was_called=True)
            if not any(self._exchange.all_reduce_max([not replays.swept])):
                return

    def on_result(self, recipe: str, planned: Planned, step: int, clean: bool) -> None:
        """Take in what a replay came to, job-wide."""
        self._replays(recipe).on_result(planned, step, clean)

    def retire(self, recipe: str, planned: Planned) -> None:
        """Never replay these rows again."""
        self._replays(recipe).retire(planned)

    def end(self, recipe: str, step: int) -> Ended:
        """Begin the next cycle when all ranks have finished this one; collective over the job."""
        replays = self._replays(recipe)
        cycle = replays.cycle
        uncounted = self._uncounted.get(recipe, "")
        flags = [not cycle.done, not cycle.empty, cycle.lost, bool(uncounted)]
        undone, waiting, lost, unknown = self._exchange.all_reduce_max([int(f) for f in flags])
        if unknown and recipe not in self._given_up:
            self._given_up.add(recipe)
            self._uncounted.setdefault(recipe, "another rank cannot read its calls")
            return Ended(replays.executed_recipe, lost=self._uncounted[recipe])
        if undone:
            return Ended(replays.executed_recipe)
        proven = replays.next_cycle(step, empty=not waiting)
        return Ended(replays.executed_recipe, None if lost or unknown else proven)

    def close(self) -> None:
        """Take every hook away."""
        self.counting = False
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _replays(self, recipe: str) -> ExpertReplays:
        replays = self._classes[recipe].replays
        assert replays is not None  # `plans` said so
        return replays

    def _take_in(self, recipe: str, was_called: bool) -> tuple[Shape, ...]:
        """Account for the calls since the last check; return what this rank wants replayed."""
        log = self._logs.get(recipe)
        if log is None:
            return ()
        replays = self._replays(recipe)
        taken = log.take()
        replays.on_calls(taken.calls, taken.missed_rows)
        if was_called and not log.seen:
            self._uncounted.setdefault(recipe, "compiled code calls it past every hook")
        return replays.waiting(MOST_TOLD)

    def _logged(self, log: RowLog, calls: ExpertCalls) -> Callable[[nn.Module, Any, Any], None]:
        def log_call(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.counting or torch.compiler.is_compiling():
                return
            try:
                log.add(self._step_now(), *calls.counts(args, kwargs))
            except Exception as error:  # noqa: BLE001 -- guard: a hook of SCOUT never raises
                self.counting = False
                self._on_error(error)

        return log_call

    def _coverage(self, name: str, each: ExpertClass) -> ExpertCoverage:
        shares = each.replays.shares if each.replays is not None and name in self._logs else None
        uncounted = self._uncounted.get(name, "")
        gap = f"executed rows are not known: {uncounted}" if uncounted else each.gap
        return ExpertCoverage(name, each.relies_on, shares, gap)
