"""From timed collectives to a diagnosis: which groups are slow, and what explains them.

A group is compared with its siblings, the groups of the same kind, size and number of hosts, by the
calibrated straggler rule, and with its own history, which also sees what all siblings share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scout_core.decision.baseline import SlowdownRule
from scout_core.decision.consensus import Status
from scout_core.decision.evidence import is_healthy_duration
from scout_core.decision.localize import Diagnosis, localize
from scout_core.decision.observed_groups import Observation
from scout_core.decision.straggler import StragglerRule
from scout_core.decision.topology import MIN_PEERS, Topology
from scout_core.errors import ScoutError

PATIENCE_CHECKS = 5  # how long a group that may yet turn out slow holds the diagnosis back
LEAST_FACTOR = 1.15  # a group alone is slow from here on; a little drift counts when most share it
LEAST_LOSS_S = 50e-6  # and it loses at least this much time
RISING_CHECKS = 2  # checks of a rise after which a group may yet turn out slow
STATE_SCHEMA = "scout.communication/1"


class GroupTiming(NamedTuple):
    """One process group's collective, timed by its members."""

    ranks: tuple[int, ...]
    """Global ranks of all members, also of those that did not report."""
    kind: str
    """Axis letter of "dstpce", or "fsdp", "tp" and the like."""
    seconds: Mapping[int, float]
    """By global rank, from when all members are ready (after a barrier of the group)."""


@dataclass(frozen=True)
class CommunicationCheck:
    """What one round of timings came to."""

    diagnosis: Diagnosis
    """Empty while `settled` is False."""
    settled: bool
    """False: some group looks slow and is not confirmed yet, or was confirmed only now; repeat."""
    observations: tuple[Observation, ...]
    slowdowns: Mapping[tuple[int, ...], float]
    """How many times their own or their siblings' duration the slow groups take, by members."""


class _Key(NamedTuple):
    kind: str
    ranks: tuple[int, ...]


class _Known(NamedTuple):
    """What is said of a group again and again."""

    number: int  # in the sibling rule
    siblings: str  # name of the set of groups it is compared with
    history: str  # key of its own baseline


@dataclass
class _Judged:
    """What the groups of one round were found to be; the rest is not slow."""

    slow: dict[_Key, float] = field(default_factory=dict)
    """With how many times the usual duration they take."""
    drifting: dict[_Key, float] = field(default_factory=dict)
    """A little slower than their own past, with how many times the usual duration they take."""
    maybe: set[_Key] = field(default_factory=set)
    """May yet turn out slow."""
    unknown: set[_Key] = field(default_factory=set)
    """A member did not report, or neither siblings nor history can tell."""


class CommunicationRule:
    """Find slow groups over successive checks and explain them.

    Give all groups of a kind in the same check: siblings that are timed in different checks cannot
    be compared. State is explicit (`state`, `from_state`), so it survives a restart.
    """

    def __init__(
        self, topology: Topology, kappa: float = 5.0, least_loss_s: float = LEAST_LOSS_S
    ) -> None:
        """Start without history.

        Args:
            kappa: sensitivity of `StragglerRule`.
            least_loss_s: a group that loses less time than this is not slow.
        """
        self._topology = topology
        self._least_loss_s = least_loss_s
        self._siblings = StragglerRule(kappa, **_floors(least_loss_s))
        self._history = SlowdownRule()
        self._known: dict[_Key, _Known] = {}
        self._slow: frozenset[_Key] = frozenset()
        self._unchanged = 0

    def update(
        self,
        timings: Iterable[GroupTiming],
        *,
        compute_stragglers: Collection[int] = (),
        resources: Mapping[int | str, str] | None = None,
    ) -> CommunicationCheck:
        """Add one round of timings; `localize.localize` explains the other arguments.

        Raises:
            ScoutError: a rank outside the world, an unknown kind, or an empty group.
        """
        reported = {
            _Key(timing.kind, tuple(sorted(timing.ranks))): _group_seconds(timing)
            for timing in timings
        }
        judged = self._judge(reported)
        observations = tuple(
            Observation(key.ranks, key.kind, None if key in judged.unknown else key in judged.slow)
            for key in reported
        )
        settled = self._settle(frozenset(judged.slow), judged.maybe)
        diagnosis = Diagnosis(())
        if settled:
            diagnosis = localize(
                self._topology,
                observations,
                compute_stragglers=compute_stragglers,
                resources=resources,
            )
        factors = {key.ranks: factor for key, factor in judged.slow.items()}
        return CommunicationCheck(diagnosis, settled, observations, factors)

    def state(self) -> dict[str, Any]:
        """Return everything the rule remembers, as JSON values."""
        return {
            "schema": STATE_SCHEMA,
            "siblings": self._siblings.state(),
            "history": self._history.state(),
            "groups": [[kind, list(ranks)] for kind, ranks in self._known],
            "slow": sorted([kind, list(ranks)] for kind, ranks in self._slow),
            "unchanged": self._unchanged,
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        topology: Topology,
        kappa: float = 5.0,
        least_loss_s: float = LEAST_LOSS_S,
    ) -> CommunicationRule:
        """Continue from what `state` returned.

        Raises:
            ScoutError: not such a state.
        """
        rule = cls(topology, kappa, least_loss_s)
        if state.get("schema") != STATE_SCHEMA:
            raise ScoutError(
                f"communication state has schema {state.get('schema')!r}, not {STATE_SCHEMA!r}; "
                "start without it"
            )
        try:
            floors = _floors(least_loss_s)
            rule._siblings = StragglerRule.from_state(state["siblings"], kappa, **floors)
            rule._history = SlowdownRule.from_state(state["history"])
            for plain in state["groups"]:
                rule._know(_key(plain))
            rule._slow = frozenset(map(_key, state["slow"]))
            rule._unchanged = int(state["unchanged"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScoutError(
                f"communication state cannot be read ({error!r}); start without it"
            ) from error
        return rule

    def _settle(self, slow: frozenset[_Key], maybe: set[_Key]) -> bool:
        """Whether the slow groups can be explained, or another one has to be waited for.

        The groups of one faulty rank are confirmed one after another; in between, each would look
        like a slow link of its own.
        """
        self._unchanged = self._unchanged + 1 if slow == self._slow else 0
        self._slow = slow
        if not slow:
            return not maybe
        touched = {rank for key in slow for rank in key.ranks}
        waiting = any(not touched.isdisjoint(key.ranks) for key in maybe)
        return self._unchanged > PATIENCE_CHECKS or (self._unchanged > 0 and not waiting)

    def _judge(self, reported: Mapping[_Key, float | None]) -> _Judged:
        judged = _Judged()
        siblings: dict[str, dict[_Key, float]] = defaultdict(dict)
        for key, seconds in reported.items():
            if seconds is None:
                judged.unknown.add(key)
                continue
            known = self._know(key)
            siblings[known.siblings][key] = seconds
            trend = self._history.update(known.history, seconds)
            if trend.slow:
                losing = seconds * (1 - 1 / trend.factor) > self._least_loss_s
                clear = trend.factor >= LEAST_FACTOR and losing
                (judged.slow if clear else judged.drifting)[key] = trend.factor
            elif trend.checks >= RISING_CHECKS:
                judged.maybe.add(key)
        for name, group_seconds in siblings.items():
            if len(group_seconds) >= MIN_PEERS:
                self._compare(name, group_seconds, judged)
            else:
                judged.unknown |= {
                    key for key in group_seconds if not self._history.knows(self._know(key).history)
                }
        if 2 * len(judged.slow.keys() | judged.drifting.keys()) > len(reported):
            judged.slow = judged.drifting | judged.slow
        judged.maybe -= judged.slow.keys()
        judged.unknown -= judged.slow.keys()
        return judged

    def _compare(self, name: str, seconds: Mapping[_Key, float], judged: _Judged) -> None:
        groups = {self._know(key).number: key for key in seconds}
        times = {number: seconds[key] for number, key in groups.items()}
        verdict = self._siblings.update(name, times)
        suspects = self._siblings.suspects(name)
        if verdict.status is Status.INCONCLUSIVE and not suspects:
            judged.unknown |= seconds.keys()
        judged.maybe |= {groups[number] for number in suspects}
        factors = self._siblings.slowdowns(name) if verdict.outliers else {}
        judged.slow |= {groups[number]: factors[number] for number in sorted(verdict.outliers)}

    def _know(self, key: _Key) -> _Known:
        known = self._known.get(key)
        if known is None:
            hosts = self._topology.hosts
            places = len({hosts[rank] for rank in key.ranks if 0 <= rank < len(hosts)})
            siblings = f"{key.kind} of {len(key.ranks)} ranks on {places} hosts"
            known = self._known[key] = _Known(len(self._known), siblings, f"{key.kind} {key.ranks}")
        return known


def _floors(least_loss_s: float) -> dict[str, Any]:
    return {"relative_floor": LEAST_FACTOR - 1, "absolute_floor_s": least_loss_s}


def _key(plain: Sequence[Any]) -> _Key:
    kind, ranks = plain
    return _Key(str(kind), tuple(int(rank) for rank in ranks))


def _group_seconds(timing: GroupTiming) -> float | None:
    """The time of the member that waited least, which is the transfer; None without all of them."""
    values = [timing.seconds.get(rank) for rank in timing.ranks]
    known = [value for value in values if value is not None and is_healthy_duration(value)]
    return min(known) if known and len(known) == len(values) else None
