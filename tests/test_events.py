"""The run's folder: lines go in and come out, whatever the disk does."""

from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import stat
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.consensus import Status
from scout_core.decision.incident import Incident, Kind
from scout_core.errors import ScoutError
from scout_core.report.events import EVENTS, INCIDENTS, RunDir

INCIDENT = Incident(Kind.SDC, "SDC_REPLAY_OUTPUT", Status.INCONCLUSIVE, "ranks differ", id="1")


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "first")


@given(st.dictionaries(st.text(min_size=1), st.one_of(st.integers(), st.text(), st.booleans())))
def test_an_event_comes_back_with_its_fields(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    used = {"event", "rank", "step", "time", "self"}
    fields = {name: value for name, value in fields.items() if name not in used}
    folder = RunDir(tmp_path_factory.mktemp("run"))
    folder.emit("check", rank=3, step=40, **fields)
    (record,) = folder.events()
    taken = datetime.datetime.fromisoformat(record.pop("time"))
    assert taken.utcoffset() == datetime.timedelta(0)
    assert record == {"event": "check", "rank": 3, "step": 40, **fields}


def test_events_and_incidents_come_back_in_order(run_dir: RunDir) -> None:
    for step in range(5):
        run_dir.emit("check", rank=0, step=step)
    run_dir.report(INCIDENT)
    assert [record["step"] for record in run_dir.events()] == [0, 1, 2, 3, 4]
    assert RunDir(run_dir.path).incidents() == [INCIDENT]


def test_a_new_folder_has_no_events(run_dir: RunDir) -> None:
    assert run_dir.events() == []
    assert run_dir.incidents() == []


def test_only_the_owner_can_read(run_dir: RunDir) -> None:
    run_dir.emit("check", rank=0, step=0)
    run_dir.report(INCIDENT)
    for name in (EVENTS, INCIDENTS):
        assert stat.S_IMODE((run_dir.path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700


def test_every_line_is_strict_json(run_dir: RunDir) -> None:
    run_dir.emit("check", rank=0, step=0, seconds=math.nan, limit=math.inf, where=run_dir.path)
    (line,) = (run_dir.path / EVENTS).read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert (record["seconds"], record["limit"]) == ("NaN", "Infinity")
    assert record["where"] == str(run_dir.path)


def test_writers_may_share_the_folder(run_dir: RunDir) -> None:
    def write(rank: int) -> None:
        writer = RunDir(run_dir.path)
        for step in range(50):
            writer.emit("check", rank=rank, step=step, text="x" * 500)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    written = [(record["rank"], record["step"]) for record in run_dir.events()]
    assert sorted(written) == [(rank, step) for rank in range(4) for step in range(50)]


def test_a_line_without_its_end_is_not_read(run_dir: RunDir) -> None:
    run_dir.emit("check", rank=0, step=0)
    with (run_dir.path / EVENTS).open("a") as half_written:
        half_written.write('{"event": "che')
    assert [record["step"] for record in run_dir.events()] == [0]


def test_a_damaged_line_is_named(run_dir: RunDir) -> None:
    run_dir.emit("check", rank=0, step=0)
    with (run_dir.path / EVENTS).open("a") as damaged:
        damaged.write("{broken\n")
    with pytest.raises(ScoutError, match=r"line 2 of .*events\.jsonl is no JSON"):
        run_dir.events()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_run_dir_that_is_a_file_is_one_clear_error(tmp_path: pathlib.Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScoutError, match=r"run_dir=.*file.* is a file; name a folder"):
        RunDir(tmp_path / "file" / below)


def test_a_line_that_cannot_be_written_is_counted_and_said_once(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    (run_dir.path / EVENTS).mkdir()
    run_dir.emit("check", rank=0, step=0)
    run_dir.emit("check", rank=0, step=1)
    assert run_dir.lost == 2
    assert capfd.readouterr().err.count("cannot be written") == 1


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_nothing(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    os.symlink("/dev/full", run_dir.path / INCIDENTS)
    run_dir.report(INCIDENT)
    run_dir.emit("check", rank=0, step=0)
    assert run_dir.lost == 1
    assert "No space left" in capfd.readouterr().err
    assert len(run_dir.events()) == 1
