"""A failure of SCOUT itself never stops training and never leaves a rank waiting."""

from __future__ import annotations

import pathlib
import random
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from integration_tests.jobs import JobOptions, build, raw
from scout_core import Incident, enable_resiliency
from scout_core.integration import subject
from scout_core.lab.faults import Corruption, FaultAt
from scout_core.lab.model import Text, loss_of
from scout_core.lab.parallel import plain_parameters
from scout_core.report.events import RunDir
from scout_core.testing import run_ranks

STEPS = 8
SCOUT = {"interval_steps": 1, "timing_repeats": 2, "exchange_timeout_s": 6}


class Seen(NamedTuple):
    parameters: list[bytes]
    incidents: list[Incident]
    armed: bool
    checks: int
    not_covered: tuple[str, ...]
    called: int
    seconds: float


def run(rank: int, case: str, odd: int, run_dir: str) -> Seen:
    options = JobOptions("ddp", 4, steps=STEPS)
    model, optimizer, mesh = build(options)
    calls: list[Incident] = []

    def callback(incident: Incident) -> None:
        calls.append(incident)
        raise RuntimeError("the user's callback is broken")

    session = None
    if case != "off":
        session = enable_resiliency(
            model, optimizer, SCOUT, mesh=mesh, run_dir=run_dir, fault_callback=callback
        )
        if rank == odd:
            _break(case, session)
    text = Text(16)
    begin = time.monotonic()
    for step in range(STEPS):
        if case == "callback" and step == 3 and rank == odd:
            corrupt = Corruption(FaultAt("sdc", rank, step))
            corrupt(next(iter(model.module.layers[0].parameters())))
        optimizer.zero_grad()
        loss_of(model, *text.batch(0, rank, step, 2)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    seconds = time.monotonic() - begin
    seen = Seen(
        [raw(p) for p in plain_parameters(model)],
        session.incidents() if session else [],
        session.armed if session else False,
        session.check_count if session else 0,
        session.coverage().not_covered if session else (),
        len(calls),
        seconds,
    )
    if session:
        session.close()
    dist.barrier()
    return seen


def _break(case: str, session: Any) -> None:
    """Break SCOUT on this rank, from outside."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        error = torch.OutOfMemoryError if case.startswith("out of memory") else RuntimeError
        raise error(f"{case} on purpose")

    if case in ("replay raises", "out of memory in replay"):
        subject.replay = fail  # type: ignore[assignment]
    elif case == "out of memory before the broadcast":
        subject.copies_for = fail  # type: ignore[assignment]
    elif case == "arming raises":
        session._checker._subject = fail
    elif case == "interpreting raises":
        session._checker.interpreter.news = fail
    elif case == "a collective fails":
        session._exchange.all_gather = fail


def compare(case: str, tmp_path: pathlib.Path, odd: int) -> list[Seen]:
    plain = run_ranks(4, run, "off", odd, "", timeout_s=60)
    seen: list[Seen] = run_ranks(4, run, case, odd, str(tmp_path), timeout_s=60)
    assert [each.parameters for each in seen] == [each.parameters for each in plain]
    return seen


@pytest.mark.timeout(140)
@pytest.mark.parametrize(
    "case", ["replay raises", "out of memory in replay", "out of memory before the broadcast"]
)
def test_a_failing_replay_retires_its_recipe_and_training_goes_on(
    case: str, tmp_path: pathlib.Path
) -> None:
    odd = random.Random(case).randrange(4)
    seen = compare(case, tmp_path, odd)
    assert all(each.incidents == [] and each.armed for each in seen)
    assert all(each.checks == STEPS for each in seen)
    assert all(any(f"rank {odd}" in line for line in each.not_covered) for each in seen)
    assert len({each.not_covered for each in seen}) == 1


@pytest.mark.timeout(140)
@pytest.mark.parametrize("case", ["arming raises", "interpreting raises"])
def test_an_internal_error_switches_scout_off_on_all_ranks_with_one_event(
    case: str, tmp_path: pathlib.Path
) -> None:
    odd = random.Random(case).randrange(4)
    seen = compare(case, tmp_path, odd)
    assert all(not each.armed and each.incidents == [] for each in seen)
    assert all(each.seconds < 40 for each in seen)
    events = [event["event"] for event in RunDir(tmp_path).events()]
    assert events.count("disarmed") == 1
    assert events.count("internal_error") == 1


@pytest.mark.timeout(140)
def test_a_failing_collective_ends_at_its_deadline_and_training_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    seen = compare("a collective fails", tmp_path, odd=2)
    assert all(not each.armed for each in seen)


@pytest.mark.timeout(140)
def test_a_raising_callback_is_logged_and_changes_nothing_else(tmp_path: pathlib.Path) -> None:
    seen: list[Seen] = run_ranks(4, run, "callback", 1, str(tmp_path), timeout_s=60)
    assert all(each.armed and each.checks == STEPS for each in seen)
    assert all([i.culprit_ranks for i in each.incidents] == [(1,)] for each in seen)
    assert all(each.called == 1 for each in seen)
    events = [event["event"] for event in RunDir(tmp_path).events()]
    assert events.count("callback_failed") == 4  # one per rank


@pytest.mark.timeout(140)
def test_a_run_dir_that_cannot_be_written_does_not_stop_training() -> None:
    seen: list[Seen] = run_ranks(4, run, "unwritable", 0, "/proc/scout_runs", timeout_s=60)
    assert all(each.armed and each.checks == STEPS for each in seen)
