"""A discovery observes every shape often enough, survives an interruption, and counts its cost."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from scout_core.decision.catalog import Observation, Shape
from scout_core.decision.environment import Environment
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import Entry, Journal, read_catalog, write_catalog
from scout_core.evidence.kernel_profile import Unseen
from scout_core.lab.discovery import Plan, discover

ENVIRONMENT = Environment(
    gpu="NVIDIA A100",
    num_sms=108,
    driver="580.65.06",
    cuda="13.0",
    torch="2.13.0",
    nccl="2.29.7",
    kernel_library="scout grouped GEMM",
    kernel_version="1",
    kernel_settings="tile 32x128x64",
    dtype="float32",
    in_features=8,
    out_features=8,
    local_experts=1,
    row_alignment=1,
    degrees="d=4",
)
PLAN = Plan((1, 2, (3, 4)), ENVIRONMENT)


class Scripted:
    """A profiler that calls a function and notes what it was asked."""

    name = "scripted"

    def __init__(self, observe: Callable[[Shape, int], Observation | Unseen]) -> None:
        self.asked: list[Shape] = []
        self._observe = observe

    def observe(self, shape: Shape) -> Observation | Unseen:
        self.asked.append(shape)
        return self._observe(shape, len(self.asked))


def same(shape: Shape, call: int) -> Observation:
    return Observation(shape, "F", {"tile": 1})


def interrupted_at(last: int) -> Callable[[Shape, int], Observation]:
    def observe(shape: Shape, call: int) -> Observation:
        if call > last:
            raise KeyboardInterrupt
        return same(shape, call)

    return observe


def test_every_shape_is_observed_in_rounds() -> None:
    profiler = Scripted(same)
    found = discover(PLAN, profiler)
    assert profiler.asked == list(PLAN.shapes) * 3
    assert found.catalog.shapes == PLAN.shapes
    assert found.discovery.unseen == {}


def test_its_cost_is_a_figure() -> None:
    ticks = itertools.count()
    found = discover(PLAN, Scripted(same), clock=lambda: float(next(ticks)))
    assert (found.discovery.observe_s, found.discovery.build_s) == (9.0, 1.0)
    assert (found.discovery.shapes, found.discovery.repeats) == (3, 3)
    assert "3 shapes x 3 observations by scripted in 9.0 s" in str(found.discovery)


def test_progress_counts_every_observation() -> None:
    advanced: list[int] = []
    discover(PLAN, Scripted(same), advance=advanced.append)
    assert sum(advanced) == 9


@pytest.mark.parametrize("last", range(9))
def test_an_interrupted_discovery_goes_on_where_it_stopped(
    last: int, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "journal"
    with Journal(path, PLAN.key) as journal, pytest.raises(KeyboardInterrupt):
        discover(PLAN, Scripted(interrupted_at(last)), journal)
    profiler = Scripted(same)
    with Journal(path, PLAN.key) as journal:
        found = discover(PLAN, profiler, journal)
        journal.remove()
    assert len(profiler.asked) == 9 - last
    assert found.discovery.resumed == last
    whole = discover(PLAN, Scripted(same))
    assert found.catalog.observations() == whole.catalog.observations()
    assert not path.exists()


def test_a_line_cut_by_a_crash_is_observed_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "key") as journal:
        for shape in PLAN.shapes:
            journal.add(Entry(shape, 0.5, same(shape, 0), ""))
    path.write_text(path.read_text()[:-9])
    with Journal(path, "key") as journal:
        assert [entry.shape for entry in journal.entries] == [1, 2]
        journal.add(Entry((3, 4), 0.5, None, "reason"))
    with Journal(path, "key") as journal:
        assert journal.entries[2] == Entry((3, 4), 0.5, None, "reason")


def test_a_journal_of_another_discovery_is_not_continued(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "journal"
    other = PLAN._replace(environment=replace(ENVIRONMENT, driver="590.1"))
    assert PLAN.key != other.key != PLAN._replace(shapes=(1,)).key
    with Journal(path, PLAN.key):
        pass
    with pytest.raises(ScoutError, match="belongs to a discovery with other shapes"):
        Journal(path, other.key)


@pytest.mark.parametrize("text", ["{}\n", "no json\n", '{"schema": 1, "key": 2}\n'])
def test_a_damaged_journal_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(ScoutError, match="delete it"):
        Journal(path, "key")


def test_a_kernel_choice_that_changes_over_time_is_an_error_by_name() -> None:
    autotuned = Scripted(lambda shape, call: Observation(shape, f"tile {call > 4}", (1,)))
    with pytest.raises(ScoutError, match="shape 2 was observed with fingerprints"):
        discover(PLAN, autotuned)


def test_a_shape_unseen_once_is_replayed_itself() -> None:
    def observe(shape: Shape, call: int) -> Observation | Unseen:
        return Unseen("too dark") if call == 4 else same(shape, call)

    found = discover(PLAN, Scripted(observe))
    assert found.discovery.unseen == {"too dark": 1}
    assert found.catalog.representatives == (1, (3, 4))


@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_fewer_than_three_repeats_are_refused(repeats: int) -> None:
    with pytest.raises(ScoutError, match=f"repeats={repeats} of a discovery must be >= 3"):
        discover(PLAN._replace(repeats=repeats), Scripted(same))


def test_a_discovery_of_nothing_is_refused() -> None:
    with pytest.raises(ScoutError, match="at least one shape"):
        discover(PLAN._replace(shapes=()), Scripted(same))


def test_a_catalogue_file_is_written_whole_and_private(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "catalogue.json"
    found = discover(PLAN, Scripted(same))
    write_catalog(path, found)
    assert read_catalog(path).to_json() == found.to_json()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_files_that_cannot_be_used_are_errors_by_name(tmp_path: pathlib.Path) -> None:
    found = discover(PLAN, Scripted(same))
    missing = tmp_path / "no" / "such" / "file"
    with pytest.raises(ScoutError, match=r"cannot be written to .*: No such file"):
        write_catalog(missing, found)
    with pytest.raises(ScoutError, match=r"cannot be read from .*: No such file"):
        read_catalog(missing)
    with pytest.raises(ScoutError, match=r"the journal .* cannot be used"):
        Journal(missing, "key")
    text = tmp_path / "text"
    text.write_text(json.dumps(found.to_json())[:-5])
    with pytest.raises(ScoutError, match="is not JSON"):
        read_catalog(text)
