"""What the rules have learned about a job's times, kept in its run folder over a restart.

Each rank keeps the state of its own rules, which it shares with its work group. After a restart
of the same job on the same machines it is taken up again, on all ranks or on none.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import xxhash

from scout_core.errors import ScoutError
from scout_core.evidence.exchange import Exchange
from scout_core.integration.job_facts import JobFacts
from scout_core.integration.record_keeper import Emit

FOLDER = "rules"
_SCHEMA = "scout.rules/1"
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)  # what odd JSON values raise
SAVE_CHECKS = 20  # checks between two savings; a kill loses what was learned since


class Learner(Protocol):
    """Something with rules that remember."""

    @property
    def name(self) -> str:
        """How its state is called in the file."""

    def state(self) -> dict[str, Any]:
        """Return what it remembers, as JSON values."""

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises:
            ScoutError: not such a state.
        """


class RuleMemory:
    """Saves the learners of one rank, and gives them back what an earlier process learned."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        exchange: Exchange,
        facts: JobFacts,
        learners: Sequence[Learner],
        emit: Emit,
    ) -> None:
        """Take up what the run folder holds of the same job on the same machines; collective."""
        self._path = run_dir / FOLDER / f"rank-{exchange.rank:05d}.json"
        self._learners = {learner.name: learner for learner in learners}
        self._emit = emit
        topology = facts.topology
        machines = repr((topology.dense, topology.expert, topology.hosts, facts.devices))
        self._identity = xxhash.xxh3_64_hexdigest(machines.encode())
        self._saved = 0
        self.checks = self._take_up(exchange)
        """Checks that were learned from, before the restart and since."""

    def on_check(self) -> None:
        """A check has ended; save now and then."""
        self.checks += 1
        if self.checks - self._saved >= SAVE_CHECKS:
            self.save()

    def save(self) -> None:
        """Save what was learned; a file that cannot be written is one event, no error."""
        self._saved = self.checks
        plain = {
            "schema": _SCHEMA,
            "machines": self._identity,
            "checks": self.checks,
            "rules": {name: learner.state() for name, learner in self._learners.items()},
        }
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(plain))
            os.replace(temporary, self._path)
        except OSError as error:
            self._emit("rules_not_saved", error=str(error))

    def _take_up(self, exchange: Exchange) -> int:
        found = self._read()
        blank = {name: learner.state() for name, learner in self._learners.items()}
        mine = 0 if found is None else int(found["checks"])
        try:
            if found is not None:
                for name, learner in self._learners.items():
                    learner.take_up(found["rules"][name])
        except (ScoutError, *_UNREADABLE) as error:
            self._emit("rules_not_taken_up", error=str(error))
            mine = 0
        told = exchange.all_gather(str(mine).encode(), tuple(range(exchange.world_size)))
        if mine and len(set(told)) == 1:
            return mine
        for name, learner in self._learners.items():
            learner.take_up(blank[name])
        return 0

    def _read(self) -> dict[str, Any] | None:
        try:
            plain: dict[str, Any] = json.loads(self._path.read_text())
            known = (plain["schema"], plain["machines"]) == (_SCHEMA, self._identity)
            usable = known and plain["rules"].keys() == self._learners.keys()
            return plain if usable and int(plain["checks"]) > 0 else None
        except FileNotFoundError:
            return None
        except (OSError, *_UNREADABLE) as error:
            self._emit("rules_not_taken_up", error=repr(error))
            return None
