"""From a check's result to news for the job: incidents, retired recipes, remarks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scout_core.decision import narrate, qualification, replay_verdict
from scout_core.decision.baseline import SlowdownRule
from scout_core.decision.consensus import Status
from scout_core.decision.incident import Incident
from scout_core.decision.narrate import Scene
from scout_core.decision.qualification import Qualification
from scout_core.decision.straggler import StragglerRule
from scout_core.decision.topology import LayoutName, Topology
from scout_core.evidence.clock import CpuClock
from scout_core.integration.check import Repeated, Result, WorkGroups, dissent_finding
from scout_core.integration.ledger import stamped

LEAST_SLOWDOWN = 1.05  # by less all devices of a job drift together
LEAST_SLOWDOWN_OF_CPUS = 1.08  # the same where ranks and other guests share caches and clocks
MAX_ABSENCES = 3  # turns in a row in which no rank has a call: the recipe is then retired


@dataclass(frozen=True)
class News:
    """What one work group tells the job after a check."""

    incidents: tuple[Incident, ...] = ()
    retire: str = ""
    """Why the recipe cannot be replayed any more."""
    of_class: bool = False
    """The reason lies in the code of the module, so it holds for all rows of an expert stage."""
    remarks: tuple[str, ...] = ()
    broken: str = ""
    """An internal error: everybody switches SCOUT off."""
    factors: Mapping[int, float] = field(default_factory=dict)
    """How many times its peers' time each rank of the work group took; no news by itself."""

    def __bool__(self) -> bool:
        return bool(self.incidents or self.retire or self.remarks or self.broken)

    def stamped(self, job: str) -> News:
        """Give each incident its job, time and identity."""
        return replace(self, incidents=tuple(stamped(each, job) for each in self.incidents))

    def to_wire(self) -> bytes:
        """Encode as JSON."""
        plain = [incident.to_json() for incident in self.incidents]
        rest = [self.retire, self.of_class, self.remarks, self.broken, [*self.factors.items()]]
        return json.dumps([plain, *rest]).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> News:
        """Decode."""
        plain, retire, of_class, remarks, broken, factors = json.loads(data)
        incidents = tuple(map(Incident.from_json, plain))
        return cls(incidents, retire, of_class, tuple(remarks), broken, dict(factors))


class Interpreter:
    """Holds what must be remembered between checks: the straggler rule and remarks made once.

    All members of a work group feed it the same results, so all come to the same news.
    """

    name = "replays"

    def __init__(
        self, topology: Topology, devices: Mapping[int, str], kappa: float, compares: str
    ) -> None:
        self._topology = topology
        self._devices = devices
        self._kappa = kappa
        self._num_groups = len(topology.peer_groups())
        self._rule = StragglerRule(kappa, groups=self._num_groups)
        self._trend = SlowdownRule()
        self._compares = compares
        on_cpu = compares == CpuClock.compares
        self._least_slowdown = LEAST_SLOWDOWN_OF_CPUS if on_cpu else LEAST_SLOWDOWN
        self._said: set[str] = set()
        self._absences: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        """Return what the rules have learned about times, as JSON values."""
        return {"straggler": self._rule.state(), "trend": self._trend.state()}

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises:
            ScoutError: not such a state.
        """
        rule = StragglerRule.from_state(state["straggler"], self._kappa, groups=self._num_groups)
        self._trend = SlowdownRule.from_state(state["trend"])
        self._rule = rule

    def news(
        self, result: Result, groups: WorkGroups, layout: LayoutName, known: Qualification
    ) -> News:
        """Say what is new after a check.

        Args:
            known: what was qualified before this check.
        """
        site, step = result.site, result.step
        scene = Scene(self._topology, layout, step, site, self._devices, result.rows)
        ballot = result.ballot
        if ballot.broken:
            return News(broken=ballot.broken)
        if ballot.retire or ballot.absent:
            return News(retire=ballot.retire or self._absence(result), of_class=True)
        if ballot.dissent:
            finding = dissent_finding(ballot.dissent, groups.work)
            return News((narrate.other_work(finding, scene),))
        if not result.entered:
            return News()
        self._absences.pop(result.turn.path_class, None)
        failures = {r: report.missing for r, report in result.reports.items() if report.missing}
        if failures:
            shown = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(failures.items()))
            return News(retire=f"the replay failed on {shown}")
        armed = result.turn.recipe in known.recipes
        why = qualification.why_not_reproducible(armed, result.reports)
        # Parameters that never were equal on the replicas cannot give equal results either.
        unequal = result.site in result.known.differing_units
        audited = replay_verdict.AUDITED
        found = [r for r in result.found if not (why or unequal) or r.finding.reason in audited]
        incidents = [_incident(r, scene) for r in found]
        incidents += self._new_differences(result, groups, known, scene)
        if result.turn.timed and not why:
            incidents += self._stragglers(result, groups, scene)
        factors = self._factors(result, groups) if result.turn.timed else {}
        return News(tuple(incidents), why, remarks=self._remarks(result), factors=factors)

    def _absence(self, result: Result) -> str:
        """Retire a recipe that no rank could replay several times in a row."""
        recipe = result.turn.path_class
        self._absences[recipe] = self._absences.get(recipe, 0) + 1
        return result.ballot.absent if self._absences[recipe] >= MAX_ABSENCES else ""

    def _new_differences(
        self, result: Result, groups: WorkGroups, known: Qualification, scene: Scene
    ) -> list[Incident]:
        new = result.known.differing_units - known.differing_units
        if not new:
            return []
        return [narrate.state_differs_at_start(sorted(new), groups.work, scene)]

    def _stragglers(self, result: Result, groups: WorkGroups, scene: Scene) -> list[Incident]:
        """Compare ranks with their peers, and each group with its own past."""
        incidents = []
        for peers in groups.peers:
            times = replay_verdict.durations(result.reports, peers)
            if len(times) < len(peers):
                continue
            recipe = _timed_recipe(result, peers)
            trend = self._trend.update(recipe, statistics.median(times.values()))
            if trend.slow and trend.factor >= self._least_slowdown:
                incidents.append(
                    narrate.group_slowdown(times, trend.factor, trend.checks, self._compares, scene)
                )
            verdict = self._rule.update(recipe, times)
            if verdict.status is Status.ATTRIBUTED:
                factors = self._rule.slowdowns(recipe)
                ranks = sorted(verdict.outliers)
                incidents.append(narrate.straggler(ranks, times, factors, self._compares, scene))
        return incidents

    def _factors(self, result: Result, groups: WorkGroups) -> dict[int, float]:
        """Collect what the rule says of all ranks, also of those that it does not name."""
        factors: dict[int, float] = {}
        for peers in groups.peers:
            factors |= self._rule.slowdowns(_timed_recipe(result, peers))
        return factors

    def _remarks(self, result: Result) -> tuple[str, ...]:
        remarks = [text for text in (result.ballot.remark, result.remark) if text]
        wild = [rank for rank, report in result.reports.items() if not report.finite]
        if wild:
            remarks.append(f"{result.site} gives NaN or infinity on ranks {wild}")
        new = tuple(remark for remark in remarks if remark not in self._said)
        self._said |= set(new)
        return new


def _timed_recipe(result: Result, peers: Sequence[int]) -> str:
    """Name what the straggler rule compares: a recipe, on the same shapes, in one peer group."""
    return f"{result.turn.recipe}|{result.shapes}|{peers[0]}"


def _incident(repeated: Repeated, scene: Scene) -> Incident:
    finding = repeated.finding
    if finding.reason in replay_verdict.AUDITED:
        scene = replace(scene, rows=())  # memory at rest has no shape
    if finding.reason in replay_verdict.MASTERS:
        return narrate.incoherent(finding, scene)
    return narrate.sdc(finding, repeated.reproduced, repeated.repeats, scene)
