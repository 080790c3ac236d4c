"""`scout status`: the table, the JSON object, and what it says when nobody answers."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from typer.testing import CliRunner

from scout_core.cli.main import app
from scout_core.cli.output import BAD_USAGE, FOUND_FAULT, FOUND_NOTHING
from scout_core.cli.status import ask
from scout_core.decision.evidence import Progress
from scout_core.decision.snapshots import GroupState, Operation, ProcessState, RankSnapshot
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.observer.reporter import Reporter
from scout_core.observer.wire import HubSocket, new_keys
from scout_core.report.events import RunDir

SIZE = 3


def snapshot(rank: int, *, late: bool = True) -> RankSnapshot:
    """Rank 2 has not entered what the others wait in."""
    entered = 4 if rank < 2 else 3
    operation = Operation(4, "all_reduce", call_site="train.py:7 step", age_s=9.5)
    group = GroupState("dp", (0, 1, 2), entered, 3, operations=(operation,) * (rank < 2))
    return RankSnapshot(
        rank,
        host="box",
        state=ProcessState.ALIVE,
        progress=Progress(12, 3),
        phase_age_s=9.5,
        within_limit=not late,
        groups=(group,),
    )


class FakeJob:
    """A hub that answers `scout status` from made-up snapshots."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.reporter = Reporter(RunDir(folder), Topology.from_degrees(d=SIZE), "job")
        self._context: zmq.Context[Any] = zmq.Context()
        keys, visitor = new_keys(), new_keys()
        self._socket = HubSocket(self._context, keys, 1.0)
        self._socket.allow([visitor.public])
        port = self._socket.bind("127.0.0.1", 0)
        place = {
            "node": 0,
            "endpoint": f"tcp://127.0.0.1:{port}",
            "public_key": keys.public,
            "visitor": visitor._asdict(),
            "pid": 1,
        }
        (folder / "observer-0.json").write_text(json.dumps(place))
        self.late = True
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            for each in self._socket.sockets:
                each.poll(10)
            for sender, _ in self._socket.receive():
                snapshots = [snapshot(rank, late=self.late) for rank in range(SIZE)]
                self._socket.send(sender, self.reporter.status(snapshots))

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._socket.close()
        self._context.term()


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[FakeJob]:
    made = FakeJob(tmp_path)
    yield made
    made.close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["status", *arguments])
    return result.exit_code, result.stdout


def test_a_healthy_job_is_shown_and_exits_with_0(job: FakeJob, tmp_path: pathlib.Path) -> None:
    job.late = False
    code, text = run(str(tmp_path), "--json")
    found = json.loads(text)
    assert (code, found["schema"], found["incidents"]) == (FOUND_NOTHING, "scout.status/1", [])
    assert [row["coordinate"]["d"] for row in found["ranks"]] == [0, 1, 2]
    assert [row["late"] for row in found["ranks"]] == [False] * 3
    pending = found["ranks"][0]["pending"]
    assert (pending["operation"], pending["group"], pending["age_s"]) == ("all_reduce", "dp", 9.5)
    assert found["ranks"][2]["pending"] is None


def test_a_hang_is_shown_and_exits_with_3(job: FakeJob, tmp_path: pathlib.Path) -> None:
    job.reporter.judge([snapshot(rank) for rank in range(SIZE)], 0.0)
    code, text = run(str(tmp_path), "--json")
    assert code == FOUND_FAULT
    assert [c["rank"] for c in json.loads(text)["incidents"][0]["culprits"]] == [2]
    code, text = run(str(tmp_path))
    assert code == FOUND_FAULT
    assert "rank 2" in text


def test_a_folder_without_observer_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ScoutError, match="has no observer: the job has ended"):
        ask(tmp_path)
    assert isinstance(CliRunner().invoke(app, ["status", str(tmp_path)]).exception, ScoutError)
    assert BAD_USAGE == 2


def test_an_observer_that_was_killed_is_said_in_time(tmp_path: pathlib.Path) -> None:
    FakeJob(tmp_path).close()
    with pytest.raises(ScoutError, match=r"no observer of .* answers within 0 s"):
        ask(tmp_path, timeout_s=0.2)
