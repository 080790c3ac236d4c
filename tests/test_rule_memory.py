"""What rules have learned survives a restart of the same job on the same machines, for all ranks
or for none."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from scout_core.decision.rotation import Rotation
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import LocalExchange, run_threads
from scout_core.integration.job_facts import JobFacts
from scout_core.integration.rule_memory import FOLDER, SAVE_CHECKS, RuleMemory

RANKS = 3
FACTS = JobFacts(
    Topology.from_degrees(d=RANKS), dict.fromkeys(range(RANKS), "cpu"), Rotation(()), ()
)


class Counter:
    """A learner that counts."""

    name = "counter"

    def __init__(self) -> None:
        self.value = 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def take_up(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state.get("value"), int):
            raise ScoutError("no counter")
        self.value = state["value"]


def job(
    folder: pathlib.Path, checks: int, facts: JobFacts = FACTS, save: bool = True
) -> list[tuple[int, int, list[str]]]:
    """Run one process per rank; (value at start, checks at start, events) by rank."""

    def run(exchange: LocalExchange) -> tuple[int, int, list[str]]:
        events: list[str] = []
        counter = Counter()
        memory = RuleMemory(
            folder, exchange, facts, [counter], lambda event, **_: events.append(event)
        )
        start = (counter.value, memory.checks, events)
        for _ in range(checks):
            counter.value += 1
            memory.on_check()
        if save:
            memory.save()
        return start

    found: list[tuple[int, int, list[str]]] = run_threads(RANKS, run, 20.0)
    return found


def test_a_restart_takes_up_what_was_learned(tmp_path: pathlib.Path) -> None:
    assert job(tmp_path, 7) == [(0, 0, [])] * RANKS
    assert job(tmp_path, 2) == [(7, 7, [])] * RANKS
    assert job(tmp_path, 0) == [(9, 9, [])] * RANKS


def test_after_a_kill_what_was_saved_in_passing_is_taken_up(tmp_path: pathlib.Path) -> None:
    job(tmp_path, SAVE_CHECKS + 3, save=False)
    assert job(tmp_path, 0) == [(SAVE_CHECKS, SAVE_CHECKS, [])] * RANKS


@pytest.mark.parametrize(
    "other",
    [
        replace(FACTS, topology=Topology.from_degrees(s=RANKS)),
        replace(FACTS, topology=Topology.from_degrees(d=RANKS, hosts=["a", "b", "c"])),
        replace(FACTS, devices=dict.fromkeys(range(RANKS), "other")),
    ],
)
def test_other_addresses_machines_or_devices_start_anew(
    tmp_path: pathlib.Path, other: JobFacts
) -> None:
    job(tmp_path, 4)
    assert job(tmp_path, 0, other) == [(0, 0, [])] * RANKS


@pytest.mark.parametrize("damage", ["gone", "other", "no json", "no counter", "odd"])
def test_when_one_rank_lacks_its_file_no_rank_takes_up_anything(
    tmp_path: pathlib.Path, damage: str
) -> None:
    job(tmp_path, 4)
    rank = random.randrange(RANKS)
    file = tmp_path / FOLDER / f"rank-{rank:05d}.json"
    plain = json.loads(file.read_text())
    if damage == "gone":
        file.unlink()
    elif damage == "other":
        file.write_text(json.dumps({**plain, "checks": 5}))
    elif damage == "no json":
        file.write_text(file.read_text()[:-5])
    else:
        state = [] if damage == "odd" else {}
        file.write_text(json.dumps({**plain, "rules": {"counter": state}}))
    found = job(tmp_path, 0)
    assert [each[:2] for each in found] == [(0, 0)] * RANKS
    said = damage in ("no json", "no counter", "odd")
    assert found[rank][2] == ["rules_not_taken_up"] * said


def test_a_folder_that_cannot_be_written_is_an_event(tmp_path: pathlib.Path) -> None:
    (tmp_path / FOLDER).write_text("a file")

    def run(exchange: LocalExchange) -> list[str]:
        events: list[str] = []
        memory = RuleMemory(
            tmp_path, exchange, FACTS, [Counter()], lambda event, **_: events.append(event)
        )
        memory.save()
        return events

    for events in run_threads(RANKS, run, 20.0):
        assert events == ["rules_not_taken_up", "rules_not_saved"]
