"""The observer names who holds a real job up: the bug log of others, and what strikes processes.

Every case is a gloo job of 2-8 processes that ends by a deadline. The table says what SCOUT must
report; which rank is at fault is drawn from the name of the case, so it differs between cases.
"""

from __future__ import annotations

import functools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import pytest

from integration_tests import hang_recipes as recipes
from integration_tests.hang_jobs import (
    AGENT_GONE_S,
    STALL_S,
    Job,
    Recipe,
    Trainer,
    is_running,
)
from integration_tests.hang_strikes import happens
from scout_core.cli.status import ask
from scout_core.config import HangConfig
from scout_core.decision.consensus import Status
from scout_core.report.events import RunDir

SIZE = 4
QUIET_S = 1.0
"""How long after the end of a job nothing may be reported."""


@dataclass(frozen=True)
class Case:
    """A recipe and the verdict that is right."""

    recipe: Recipe
    reason: str
    size: int = SIZE
    among: tuple[int, ...] = ()
    """Ranks that can be at fault; all when empty."""
    culprits: tuple[int, ...] | None = None
    """None: exactly the faulty rank. Empty: nobody can be singled out."""
    victims: tuple[int, ...] | None = None
    """None: all others, or nobody when there is no culprit."""

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.recipe.__name__


NOBODY: tuple[int, ...] = ()
EVERYBODY = tuple(range(SIZE))
CASES = (
    # A. Desync and mismatch
    Case(recipes.drops_a_sample, "INPUT_STALL"),
    Case(recipes.swallows_an_exception_in_backward, "HANG_NEVER_ARRIVED"),
    Case(recipes.optimizer_returns_early, "HANG_NEVER_ARRIVED"),
    Case(recipes.reduces_where_others_broadcast, "HANG_MISMATCH"),
    Case(
        recipes.two_ranks_diverge_after_a_checkpoint,
        "HANG_MISMATCH",
        size=2,
        culprits=NOBODY,
        victims=(0, 1),
    ),
    Case(recipes.half_gathers_objects, "HANG_MISMATCH", culprits=NOBODY, victims=EVERYBODY),
    Case(recipes.hook_fires_only_with_tokens, "HANG_NEVER_ARRIVED"),
    Case(recipes.skips_a_submodule, "HANG_MISMATCH"),
    Case(recipes.leaves_out_a_barrier, "HANG_NEVER_ARRIVED"),
    Case(
        recipes.stage_without_experts,
        "HANG_NEVER_ARRIVED",
        among=(2, 3),
        culprits=(2, 3),
        victims=(0, 1),
    ),
    Case(recipes.has_no_batch_for_the_last_exchange, "HANG_NEVER_ARRIVED"),
    Case(recipes.has_one_batch_less, "HANG_NEVER_ARRIVED"),
    Case(recipes.evaluates_on_one_rank_only, "HANG_MISMATCH"),
    Case(recipes.saves_on_some_ranks_only, "HANG_NEVER_ARRIVED"),
    # B. Exceptions, loaders, processes
    Case(recipes.swallows_an_exception_and_waits_in_its_loader, "INPUT_STALL"),
    Case(recipes.pipeline_replica_stays_in_its_loader, "INPUT_STALL", size=8, among=(0, 1, 2, 3)),
    Case(recipes.even_ranks_stay_away, "HANG_NEVER_ARRIVED", culprits=(0, 2), victims=(1, 3)),
    Case(recipes.all_wait_on_a_key, "HANG_GROUP_STALL", culprits=NOBODY),
    Case(recipes.all_wait_on_a_key, "HANG_GROUP_STALL", size=2, culprits=NOBODY),
    # C. Point-to-point and pipelines
    Case(recipes.receives_before_sends_in_a_ring, "HANG_CYCLE", culprits=NOBODY),
    Case(recipes.swaps_tags, "HANG_MISMATCH", culprits=NOBODY, victims=EVERYBODY),
    Case(recipes.sends_on_both_sides, "HANG_CYCLE", size=2, culprits=NOBODY),
    # Every kind of caller, and what must not hide the culprit
    Case(recipes.sleeps_before_fully_sharded_forward, "HANG_NEVER_ARRIVED"),
    Case(recipes.sleeps_inside_a_pipeline_stage, "HANG_NEVER_ARRIVED"),
    Case(recipes.stays_away_from_an_object_collective, "HANG_NEVER_ARRIVED"),
    Case(recipes.does_extra_local_collectives_first, "HANG_NEVER_ARRIVED"),
    Case(recipes.sleeps_in_one_of_two_overlapping_groups, "HANG_NEVER_ARRIVED"),
    Case(recipes.groups_are_made_in_another_order, "HANG_GROUP_STALL", culprits=NOBODY),
)
CASE_NAMES = [f"{case.name}-{case.size}" for case in CASES]


def drawn(name: str, among: tuple[int, ...]) -> int:
    """A rank that is the same in every run, and another one in every case."""
    return random.Random(name).choice(among)


def assert_gone(agents: list[int]) -> None:
    """The agents of a job that has ended end, too, and leave nothing behind."""
    deadline = time.monotonic() + AGENT_GONE_S
    while any(map(is_running, agents)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in agents if is_running(pid)]


@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_real_hang_is_explained(case: Case) -> None:
    fault = drawn(case.name, case.among or tuple(range(case.size)))
    with Job(case.recipe, case.size, fault) as job:
        incident = job.incident()
        agents = job.agents()
    culprits = (fault,) if case.culprits is None else case.culprits
    others = tuple(rank for rank in range(case.size) if rank not in culprits)
    victims = case.victims if case.victims is not None else (others if culprits else ())
    assert (incident.reason, incident.culprit_ranks) == (case.reason, culprits)
    assert incident.victims == victims
    assert incident.status is (Status.ATTRIBUTED if culprits else Status.INCONCLUSIVE)
    for culprit in incident.culprits:
        assert "hang_recipes.py" in culprit.where or "hang_jobs.py" in culprit.where
    assert_gone(agents)
    assert not [name for name in os.listdir("/dev/shm") if "ring" in name or "hang" in name]


@pytest.mark.parametrize(
    "recipe", [recipes.reduces_another_size, recipes.gathers_another_parameter]
)
def test_who_is_aborted_because_of_another_rank_is_not_named(recipe: Recipe) -> None:
    fault = drawn(recipe.__name__, EVERYBODY)
    with Job(recipe, SIZE, fault) as job:
        incident = job.incident()
    assert (incident.reason, incident.culprit_ranks) == ("HANG_MISMATCH", (fault,))


STRIKES = {
    "SIGKILL": "PROCESS_DEAD",
    "SIGSTOP": "PROCESS_STOPPED",
    "sleep": "HANG_NEVER_ARRIVED",
    "spin": "HANG_NEVER_ARRIVED",
    "GIL kept": "HANG_NEVER_ARRIVED",
}
LINES = {"sleep": "elsewhere", "spin": "spin", "GIL kept": "keep_the_gil"}


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("strike", STRIKES)
def test_what_strikes_a_process_is_named_by_the_survivors(strike: str, rank: int) -> None:
    with Job(functools.partial(happens, strike), SIZE, rank) as job:
        incident = job.incident()
    assert (incident.reason, incident.culprit_ranks) == (STRIKES[strike], (rank,))
    if strike in LINES:
        assert f" {LINES[strike]}" in incident.culprits[0].where
    if strike == "GIL kept":
        assert "keeps the GIL" in incident.culprits[0].where


def test_an_exception_is_named_with_its_text_before_any_timeout() -> None:
    rank = drawn("raises", EVERYBODY)
    with Job(recipes.raises, SIZE, rank, config=HangConfig(stall_timeout_s=600.0)) as job:
        incident = job.incident()
    assert (incident.reason, incident.culprit_ranks) == ("PROCESS_DEAD", (rank,))
    assert "ValueError: loss is nan" in incident.message


LIVING: tuple[Recipe, ...] = (
    recipes.compiles_for_long,
    recipes.evaluates_for_long,
    recipes.saves_for_long_on_one_rank,
    recipes.is_idle_on_purpose,
    functools.partial(recipes.pauses, STALL_S / 2),
)


@pytest.mark.parametrize(
    "recipe", LIVING, ids=lambda r: getattr(r, "__name__", "pauses_shorter_than_the_limit")
)
def test_a_slow_but_living_job_is_left_alone(recipe: Recipe) -> None:
    with Job(recipe, SIZE, drawn(str(recipe), EVERYBODY)) as job:
        job.join()
        assert [rank.exitcode for rank in job.ranks] == [0] * SIZE
        assert_gone(job.agents())
        assert job.run_dir.incidents() == []
        assert job.run_dir.events() == []


def test_a_pause_just_over_the_limit_is_withdrawn_when_the_job_goes_on() -> None:
    rank = drawn("pause", EVERYBODY)
    with Job(functools.partial(recipes.pauses, STALL_S + 1.5), SIZE, rank) as job:
        incident = job.incident()
        cleared = job.event("incident_cleared")
        job.join()
        assert [process.exitcode for process in job.ranks] == [0] * SIZE
        assert cleared["incident"] == incident.id
        assert len(job.run_dir.incidents()) == 1
        assert [event["event"] for event in job.run_dir.events()] == ["incident_cleared"]


def test_the_verdict_is_printed_once_by_a_living_process() -> None:
    with Job(functools.partial(happens, "SIGSTOP"), SIZE, 0) as job:
        incident = job.incident()
        job.wait(lambda: incident.message in job.output.read_text())
        assert job.output.read_text().count(incident.id) == 1


def train_until_told(trainer: Trainer) -> None:
    """Train until somebody writes a file; then the faulty rank goes elsewhere."""
    told = trainer.watch.run_dir / "go"
    while not told.exists():
        trainer.warm_up(1)
        time.sleep(0.005)
    trainer.warm_up(5)
    if trainer.faulty:
        recipes.elsewhere()
    trainer.warm_up(100)


def agent_after(job: Job, old: int, place: int = 0) -> int:
    """Wait for the agent that replaces a killed one."""
    return int(job.wait(lambda: next((p for p in job.agents()[place:] if p != old), 0)))


def test_an_agent_that_is_killed_is_replaced_and_names_the_next_hang() -> None:
    rank = drawn("agent", EVERYBODY)
    with Job(train_until_told, SIZE, rank) as job:
        first = job.wait(job.agents)[0]
        os.kill(first, signal.SIGKILL)
        agent_after(job, first)
        (job.run_dir.path / "go").touch()
        assert job.incident().culprit_ranks == (rank,)
        assert [event["event"] for event in job.run_dir.events()] == []


def test_an_agent_that_keeps_dying_ends_hang_cover_with_one_event_and_training_goes_on() -> None:
    with Job(train_until_told, SIZE, 1) as job:
        agent = job.wait(job.agents)[0]
        for _ in range(3):
            os.kill(agent, signal.SIGKILL)
            agent = agent_after(job, agent)
        os.kill(agent, signal.SIGKILL)
        lost = job.event("hang_cover_lost")
        assert lost["rank"] == 0
        assert "died 4 times" in lost["reason"]
        assert all(rank.is_alive() for rank in job.ranks)
        assert len(job.run_dir.events()) == 1


def test_the_standby_takes_over_when_the_first_hub_is_silent() -> None:
    hosts = ("left", "left", "right", "right")
    with Job(train_until_told, SIZE, 3, hosts=hosts) as job:
        first, _ = job.wait(lambda: job.agents() if len(job.agents()) == 2 else None)
        os.kill(first, signal.SIGSTOP)
        (job.run_dir.path / "go").touch()
        incident = job.incident()
        job.event("observer_standby_leads")
        os.kill(first, signal.SIGKILL)
    assert incident.culprit_ranks == (3,)
    assert incident.culprits[0].host == "right"


def test_where_collectives_cannot_be_observed_torchs_own_record_names_the_rank() -> None:
    def folders() -> set[pathlib.Path]:
        return set(pathlib.Path(tempfile.gettempdir()).glob("scout-*"))

    before, rank = folders(), drawn("flight recorder", EVERYBODY)
    with Job(recipes.optimizer_returns_early, SIZE, rank, other_tool=True) as job:
        incident = job.incident()
        agents = job.agents()
    events = [(event["event"], event["rank"]) for event in job.events_at_the_end]
    assert sorted(events) == [("collectives_not_observed", other) for other in EVERYBODY]
    assert (incident.reason, incident.culprit_ranks) == ("HANG_NEVER_ARRIVED", (rank,))
    assert_gone(agents)
    assert folders() <= before


def test_a_job_that_is_told_to_end_is_no_fault() -> None:
    with Job(train_until_told, SIZE, 1) as job:
        agents = job.wait(job.agents)
        job.wait(lambda: all(row["step"] > 0 for row in ask(job.run_dir.path)["ranks"]))
        for rank in job.ranks:
            rank.terminate()
        job.event("job_terminated")
        assert_gone(agents)
        assert job.run_dir.incidents() == []


def test_a_job_that_is_killed_as_a_whole_takes_its_agents_along() -> None:
    with Job(train_until_told, SIZE, 1, hosts=("a", "a", "b", "b")) as job:
        agents = job.wait(lambda: job.agents() if len(job.agents()) == 2 else None)
        job.kill()
        assert_gone(agents)
        assert job.incident().reason == "PROCESS_DEAD"


def test_status_shows_every_rank_while_the_job_trains_and_when_it_hangs() -> None:
    rank = drawn("status", EVERYBODY)
    with Job(train_until_told, SIZE, rank) as job:
        job.wait(job.agents)
        rows = ask(job.run_dir.path)["ranks"]
        assert [row["rank"] for row in rows] == [0, 1, 2, 3]
        assert [row["coordinate"]["d"] for row in rows] == [0, 1, 2, 3]
        assert {row["state"] for row in rows} == {"alive"}
        (job.run_dir.path / "go").touch()
        incident = job.incident()
        found = ask(job.run_dir.path)
        assert found["incident"]["id"] == incident.id
        pending = [row["rank"] for row in found["ranks"] if row["pending"]]
        assert pending == [other for other in EVERYBODY if other != rank]


UNCAUGHT = """
import sys, torch.distributed as dist
from scout_core.config import HangConfig
from scout_core.integration.hang_watch import HangWatch
from scout_core.report.events import RunDir
run_dir, store = RunDir(sys.argv[1]), dist.HashStore()
HangWatch.start(rank=0, world_size=1, run_dir=run_dir, config=HangConfig(), store=store)
raise ValueError("loss is nan")
"""


def test_an_uncaught_exception_is_published_and_still_printed(tmp_path: pathlib.Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", UNCAUGHT, str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert found.returncode == 1
    assert found.stderr.rstrip().endswith("ValueError: loss is nan")
    deadline = time.monotonic() + AGENT_GONE_S
    while not RunDir(tmp_path).incidents() and time.monotonic() < deadline:
        time.sleep(0.02)
    incident = RunDir(tmp_path).incidents()[0]
    assert incident.reason == "PROCESS_DEAD"
    assert "ValueError: loss is nan" in incident.message
