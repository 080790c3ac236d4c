"""`scout postmortem`: mixtures of dumps, snapshots and watchdog logs, and what cannot be used."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.cli import main
from scout_core.decision import snapshot_json
from scout_core.decision.hang import HangKind, RankSnapshot, diagnose
from scout_core.decision.incident import Incident
from scout_core.decision.merging import merge
from scout_core.decision.snapshots import (
    C10D_COUNTER,
    Channel,
    GroupState,
    Operation,
    Phase,
    ProcessState,
)
from scout_core.evidence import post_mortem
from scout_core.evidence.watchdog_log import parse_log
from scout_core.lab.hang_dumps import nccl_dumps, pickled
from scout_core.lab.hang_model import Job, Side, Stopped, random_faults, run_until_stopped
from scout_core.lab.traces import TracePlan, simulate_trace, write_trace

Capture = pytest.CaptureFixture[str]
JOB = Job(tensor=4, data=2, stages=1)


@pytest.fixture
def scout(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Any:
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scout", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return run


def stop(seed: int, side: Side = Side.CPU) -> tuple[Stopped, int]:
    """(a stopped job, the rank that was made to fail)."""
    fault = random_faults(JOB, random.Random(seed), 1, side)[0]
    return run_until_stopped(JOB, [fault], run_ahead=12), fault.rank


def write_dumps(folder: pathlib.Path, stopped: Stopped, ranks: Any = None) -> None:
    dumps = pickled(nccl_dumps(stopped, random.Random(0)))
    for rank, data in dumps.items():
        if ranks is None or rank in ranks:
            (folder / f"gpu-host-{rank // 4}_dump_{rank}").write_bytes(data)


def incidents(out: str) -> list[Incident]:
    record = json.loads(out)
    assert record["schema"] == "scout.postmortem/1"
    return [Incident.from_json(found) for found in record["incidents"]]


# The command


@pytest.mark.parametrize("side", list(Side))
def test_a_fault_gives_exit_code_3_and_one_incident(
    scout: Any, tmp_path: pathlib.Path, side: Side
) -> None:
    stopped, culprit = stop(4, side)
    write_dumps(tmp_path, stopped)
    code, out, err = scout("postmortem", str(tmp_path), "--json")
    (incident,) = incidents(out)
    assert (code, err) == (3, "")
    assert incident.culprit_ranks == (culprit,)
    assert incident.evidence["side"] == side.value
    assert len(incident.victims) == JOB.world_size - 1
    assert incident.time.startswith("2023-11-14")


def test_people_read_the_verdict_first(scout: Any, tmp_path: pathlib.Path) -> None:
    stopped, culprit = stop(4)
    write_dumps(tmp_path, stopped)
    code, out, _ = scout("postmortem", str(tmp_path))
    assert code == 3
    assert out.startswith(f"hang: rank {culprit}")
    assert "reason HANG_NEVER_ARRIVED" in out
    assert f"{JOB.world_size} files used" in out


def test_no_fault_gives_exit_code_0(scout: Any, tmp_path: pathlib.Path) -> None:
    write_dumps(tmp_path, run_until_stopped(JOB, []))
    code, out, _ = scout("postmortem", str(tmp_path), "--json")
    assert (code, incidents(out)) == (0, [])


def test_corrupt_and_foreign_files_are_named_and_the_rest_is_analysed(
    scout: Any, tmp_path: pathlib.Path
) -> None:
    stopped, culprit = stop(9)
    write_dumps(tmp_path, stopped)
    victim = (culprit + 1) % JOB.world_size
    damaged = tmp_path / f"gpu-host-{victim // 4}_dump_{victim}"
    damaged.write_bytes(damaged.read_bytes()[:200])
    (tmp_path / "notes.txt").write_text("nothing to see here\n")
    (tmp_path / "model.safetensors").write_bytes(b"\x01\0\0\0")
    (tmp_path / "config.json").write_text('{"layers": 3}')
    (tmp_path / "empty").write_bytes(b"")
    code, out, _ = scout("postmortem", str(tmp_path), "--json")
    (incident,) = incidents(out)
    found = json.loads(out)
    assert (code, incident.culprit_ranks) == (3, (culprit,))
    assert {s["file"] for s in found["skipped"]} == {
        *(damaged.name, "notes.txt", "model.safetensors", "config.json", "empty"),
    }
    assert all(s["why"] for s in found["skipped"])
    assert found["ranks_missing"] == [victim]
    assert incident.evidence["no_evidence_of"] == [victim]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not a folder"),
        (lambda path: path.write_text("x"), "is a file but no timing table"),
        (lambda path: path.mkdir(), "holds no evidence"),
    ],
)
def test_a_path_that_is_no_use_is_exit_code_2(
    scout: Any, tmp_path: pathlib.Path, make: Any, message: str
) -> None:
    make(tmp_path / "dumps")
    code, out, err = scout("postmortem", str(tmp_path / "dumps"), "--json")
    assert (code, out) == (2, "")
    assert message in err


def test_the_command_needs_neither_torch_nor_pandas(tmp_path: pathlib.Path) -> None:
    write_dumps(tmp_path, stop(2)[0])
    program = (
        "import sys; sys.argv = ['scout', 'postmortem', sys.argv[1]]\n"
        "from scout_core.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'pandas', 'pyarrow'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        env=environment,
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("slow", "code"), [({(2, 1): 2.0}, 3), ({}, 0)])
def test_a_table_of_timings_is_diagnosed_for_slow_ranks(
    scout: Any, tmp_path: pathlib.Path, slow: dict[tuple[int, int], float], code: int
) -> None:
    write_trace(simulate_trace(TracePlan(slow_workers=slow)), tmp_path / "trace.csv")
    ended, out, _ = scout("postmortem", str(tmp_path / "trace.csv"), "--json")
    assert ended == code
    assert [incident.kind.value for incident in incidents(out)] == ["straggler"] * len(slow)


# Mixtures


def test_snapshots_dumps_and_logs_of_different_ranks_add_up(tmp_path: pathlib.Path) -> None:
    stopped, culprit = stop(12)
    waiting = next(r for r in range(JOB.world_size) if r != culprit)
    write_dumps(tmp_path, stopped, set(range(JOB.world_size)) - {waiting})
    (tmp_path / "stderr.log").write_text("\n".join(_log_of(stopped, waiting)))
    seen = RankSnapshot(culprit, host="node-3", phase=Phase.DATA, where="data.py:7 fetch")
    (tmp_path / "ring.json").write_text(json.dumps(snapshot_json.to_json(seen)))
    remains = post_mortem.load(tmp_path)
    diagnosis = diagnose(remains.snapshots)
    assert (diagnosis.culprits, diagnosis.kind) == ((culprit,), HangKind.INPUT_STALL)
    assert diagnosis.findings[0].host == "node-3"
    assert diagnosis.findings[0].where == "data.py:7 fetch"
    assert waiting in diagnosis.victims
    assert not remains.skipped


@given(st.integers(0, 10**6))
def test_logs_in_place_of_some_dumps_blame_no_innocent(seed: int) -> None:
    rng = random.Random(seed)
    stopped, culprit = stop(seed, rng.choice(list(Side)))
    logged = set(rng.sample(range(JOB.world_size), rng.randint(1, 7)))
    dumps = nccl_dumps(stopped, rng)
    lines = [line for rank in sorted(logged) for line in _log_of(stopped, rank)]
    diagnosis = diagnose(
        _mixed({rank: dump for rank, dump in dumps.items() if rank not in logged}, lines)
    )
    assert diagnosis.culprits in ((), (culprit,))


def test_snapshots_may_come_as_a_list_or_as_lines_of_which_the_last_counts(
    tmp_path: pathlib.Path,
) -> None:
    world = (0, 1, 2)
    late = [_waiting(r, world) if r else RankSnapshot(0, complete=("scout",)) for r in world]
    early = [RankSnapshot(r, complete=("scout",)) for r in world]
    lines = [json.dumps(snapshot_json.to_json(s)) for s in (*early, *late)]
    (tmp_path / "snapshots.jsonl").write_text("\n".join(lines))
    assert diagnose(post_mortem.load(tmp_path).snapshots).culprits == (0,)
    (tmp_path / "snapshots.jsonl").write_text(f"[{', '.join(lines[3:])}]")
    assert diagnose(post_mortem.load(tmp_path).snapshots).culprits == (0,)


def test_a_snapshot_with_an_unknown_field_is_skipped_with_its_name(tmp_path: pathlib.Path) -> None:
    good = snapshot_json.to_json(RankSnapshot(0))
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "bad.json").write_text(json.dumps({**good, "rank": 1, "mood": "sad"}))
    (tmp_path / "odd.json").write_text(json.dumps({**good, "rank": "1"}))
    remains = post_mortem.load(tmp_path)
    assert [s.rank for s in remains.snapshots] == [0]
    assert [s.file for s in remains.skipped] == ["bad.json", "odd.json"]


def test_two_dumps_of_one_rank_count_once(tmp_path: pathlib.Path) -> None:
    stopped, culprit = stop(1)
    write_dumps(tmp_path, stopped)
    dumps = nccl_dumps(stopped, random.Random(0))
    (tmp_path / "copy.json").write_text(json.dumps(dumps[culprit]))
    remains = post_mortem.load(tmp_path)
    assert diagnose(remains.snapshots).culprits == (culprit,)
    assert len(remains.skipped) == 1
    assert f"of the same rank {culprit}" in remains.skipped[0].why


# Logs of the watchdog


def test_the_rank_that_enqueued_less_is_named_from_the_watchdogs_words() -> None:
    lines = [
        _timeout(0, 21937, "ALLREDUCE"),
        "[rank0]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 0] Timeout at "
        "NCCL work: 21937, last enqueued NCCL work: 21937, last completed NCCL work: 21936.",
        "[rank1]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 1] failure "
        "detected by watchdog at work sequence id: 21936 PG status: last enqueued work: 21936, "
        "last completed work: 21936",
    ]
    diagnosis = diagnose(parse_log(lines, "stderr"))
    assert (diagnosis.culprits, diagnosis.victims) == ((1,), (0,))
    assert "#21937" in diagnosis.findings[0].explanation


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:[E] [PG ID 2 PG GUID 35(TP) Rank 1] {work} last enqueued NCCL work: 9, {done}",
        "[default3]:[rank3]:[E] [PG 35 (TP) Rank 1] {work} last enqueued work: 9, {done}",
        "[rank3]:[rank3]:[E] [PG GUID 35(TP) Rank 1] {work} last enqueued NCCL work: 9, {done}",
    ],
)
def test_every_spelling_of_the_watchdog_is_understood(line: str) -> None:
    work = "WorkNCCL(SeqNum=8, OpType=_ALLGATHER_BASE, NumelIn=16, NumelOut=64, Timeout(ms)=600000)"
    text = line.format(work=f"{work} ran for 600010 milliseconds", done="last completed work: 7.")
    (snapshot,) = parse_log([text], "log")
    (state,) = snapshot.groups
    assert (snapshot.rank, state.enqueued, state.completed) == (3, 9, 7)
    assert (state.operations[0].name, state.operations[0].age_s) == ("all_gather", 600.01)
    assert state.counter == C10D_COUNTER
    assert not state.members_known


def test_the_oldest_spelling_names_a_rank_of_the_default_group() -> None:
    line = (
        "[E ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5, OpType=BROADCAST, TensorShape=[4, 2], Timeout(ms)=1000) ran for 1001"
        " milliseconds before timing out."
    )
    (snapshot,) = parse_log([line], "log")
    assert (snapshot.rank, snapshot.groups[0].enqueued) == (2, 5)
    assert snapshot.groups[0].operations[0].arguments == "shape [4, 2]"


def test_a_position_in_another_group_is_not_taken_for_a_global_rank() -> None:
    line = "[PG ID 2 PG GUID 35(TP) Rank 1] Timeout at NCCL work: 8, last enqueued NCCL work: 9"
    assert parse_log([line], "log") == []


def test_ranks_that_wrote_nothing_are_missing_not_absent() -> None:
    diagnosis = diagnose(parse_log([_timeout(r, 6, "ALLREDUCE") for r in (0, 1, 3)], "log"))
    assert (diagnosis.culprits, diagnosis.kind) == ((), HangKind.EVIDENCE_MISSING)


def test_different_operations_under_one_number_are_a_mismatch() -> None:
    kinds = ("ALLREDUCE", "ALLREDUCE", "BROADCAST")
    diagnosis = diagnose(parse_log([_timeout(r, 6, kind) for r, kind in enumerate(kinds)], "log"))
    assert (diagnosis.culprits, diagnosis.kind) == ((2,), HangKind.MISMATCH)


def test_a_rank_that_waits_in_a_receive_is_not_blamed() -> None:
    lines = [_timeout(0, 6, "RECV"), _timeout(1, 6, "ALLREDUCE"), _timeout(2, 6, "ALLREDUCE")]
    assert diagnose(parse_log(lines, "log")).culprits == ()


# Several sources about one rank


def test_the_first_source_that_knows_a_field_gives_it() -> None:
    observed = RankSnapshot(1, host="a", state=ProcessState.STOPPED, complete=("scout",))
    dumped = RankSnapshot(1, host="b", where="x.py:1", truncated=True, source="dump")
    both = merge([observed, dumped])
    assert (both.host, both.where, both.state) == ("a", "x.py:1", ProcessState.STOPPED)
    assert not both.truncated
    assert merge([RankSnapshot(1, missing="no dump"), dumped]) == dumped


def test_counts_of_one_counter_take_the_larger_and_of_two_counters_stay_apart() -> None:
    first = GroupState("0", (0, 1), 4, 3, counter=C10D_COUNTER)
    second = GroupState("0", (0,), 5, None, counter=C10D_COUNTER, members_known=False)
    other = GroupState("0", (0, 1), 9, 9)
    both = merge([RankSnapshot(0, groups=(second,)), RankSnapshot(0, groups=(first, other))])
    assert [(g.counter, g.enqueued, g.completed, g.ranks) for g in both.groups] == [
        (C10D_COUNTER, 5, 3, (0, 1)),
        ("scout", 9, 9, (0, 1)),
    ]


def test_of_two_records_of_a_channel_the_one_with_shared_numbers_is_kept() -> None:
    vague, exact = Channel("0", 1, True), Channel("0", 1, True, 4, 3)
    both = merge([RankSnapshot(0, channels=(vague,)), RankSnapshot(0, channels=(exact,))])
    assert both.channels == (exact,)


def _waiting(rank: int, world: tuple[int, ...]) -> RankSnapshot:
    operation = Operation(1, "all_reduce")
    return RankSnapshot(
        rank, complete=("scout",), groups=(GroupState("w", world, 1, 0, operations=(operation,)),)
    )


def _timeout(rank: int, number: int, kind: str) -> str:
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )


def _log_of(stopped: Stopped, rank: int) -> list[str]:
    """What NCCL's watchdog would have written for a rank of the model."""
    lines = []
    for state in stopped.snapshots()[rank].groups:
        name = list(stopped.job.groups).index(state.name)
        place = f"[rank{rank}]:[E] [PG ID 1 PG GUID {name}({state.name}) Rank 0]"
        counts = f"last enqueued NCCL work: {state.enqueued}, last completed NCCL work: "
        for operation in state.operations[:1]:
            kind = operation.name.upper().replace("_", "")
            lines.append(f"{place} WorkNCCL(SeqNum={operation.sequence}, OpType={kind}, NumelIn=8)")
        lines.append(f"{place} Timeout at NCCL work: 1, {counts}{state.completed}.")
    return lines


def _mixed(dumps: dict[int, dict[str, Any]], lines: list[str]) -> list[RankSnapshot]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for rank, dump in dumps.items():
            (pathlib.Path(folder) / f"d_{rank}.json").write_text(json.dumps(dump))
        (pathlib.Path(folder) / "log").write_text("\n".join(lines))
        return post_mortem.load(pathlib.Path(folder)).snapshots
