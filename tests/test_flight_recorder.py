"""Flight Recorder dumps: NCCL's from a model and from real jobs, gloo's from real processes."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import json
import os
import pathlib
import pickle
import random
import re
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.hang import (
    Channel,
    HangDiagnosis,
    HangKind,
    RankSnapshot,
    diagnose,
)
from scout_core.errors import ScoutError
from scout_core.evidence import flight_recorder
from scout_core.evidence.dump_format import parse_dump, unpickle
from scout_core.evidence.dump_ranks import assign_ranks
from scout_core.lab.hang_dumps import History, nccl_dumps, pickled
from scout_core.lab.hang_model import Fault, Job, Side, Stopped, random_faults, run_until_stopped
from scout_core.testing import run_ranks

REAL = (
    pathlib.Path(
        os.environ.get("SCOUT_DATA", pathlib.Path(__file__).parents[2] / "shared" / "data")
    )
    / "flight_recorder"
)
SIXTEEN = Job(tensor=4, data=2, stages=2)
seeds = st.integers(0, 10**6)
few = settings(max_examples=25, deadline=None)


def verdict(dumps: Mapping[str, dict[str, Any]]) -> HangDiagnosis:
    """Diagnose decoded dumps, given by file name."""
    snapshots, _ = flight_recorder.snapshots([parse_dump(d, name) for name, d in dumps.items()])
    return diagnose(snapshots)


def stop(seed: int, *, side: Side, count: int = 1, job: Job = SIXTEEN) -> tuple[Stopped, set[int]]:
    """(a stopped job, the ranks that were made to fail)."""
    faults = random_faults(job, random.Random(seed), count, side)
    return run_until_stopped(job, faults, run_ahead=12), {fault.rank for fault in faults}


def named(dumps: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"_dump_{rank}": dump for rank, dump in dumps.items()}


# Dumps of a model of a 16-GPU job


@few
@given(seeds, st.sampled_from(list(Side)), st.integers(1, 2), st.sampled_from(["pending", "ring"]))
def test_exactly_the_injected_ranks_are_named_on_their_side(
    seed: int, side: Side, count: int, history: History
) -> None:
    stopped, injected = stop(seed, side=side, count=count)
    diagnosis = verdict(named(nccl_dumps(stopped, random.Random(seed), history=history)))
    assert set(diagnosis.culprits) == injected
    assert diagnosis.side == side.value
    assert len(diagnosis.victims) == SIXTEEN.world_size - count


@few
@given(seeds, st.sampled_from(list(Side)))
def test_missing_files_never_blame_an_innocent(seed: int, side: Side) -> None:
    rng = random.Random(seed)
    stopped, injected = stop(seed, side=side, count=2)
    dumps = nccl_dumps(stopped, rng)
    gone = set(rng.sample(sorted(dumps), rng.randint(1, 8)))
    diagnosis = verdict(named({r: d for r, d in dumps.items() if r not in gone}))
    assert set(diagnosis.culprits) <= injected - gone
    assert diagnosis.culprits or diagnosis.kind is HangKind.EVIDENCE_MISSING


@few
@given(seeds, st.sampled_from(list(Side)), st.booleans(), st.sampled_from(["pending", "ring"]))
def test_truncated_rings_and_lost_status_never_blame_an_innocent(
    seed: int, side: Side, with_status: bool, history: History
) -> None:
    rng = random.Random(seed)
    job = Job(tensor=rng.choice([2, 4]), data=2, stages=rng.choice([1, 2, 4]))
    stopped, injected = stop(seed, side=side, job=job)
    dumps = nccl_dumps(stopped, rng, history=history)
    for dump in dumps.values():
        kept = rng.randint(0, 6)
        dump["entries"] = dump["entries"][-kept:] if kept else []
        if not with_status:
            del dump["pg_status"]
    assert set(verdict(named(dumps)).culprits) <= injected


@few
@given(seeds)
def test_a_truncated_cpu_side_fault_is_still_named(seed: int) -> None:
    stopped, injected = stop(seed, side=Side.CPU)
    dumps = nccl_dumps(stopped, random.Random(seed))
    for dump in dumps.values():
        dump["entries"] = dump["entries"][-3:]
    assert set(verdict(named(dumps)).culprits) == injected


def test_a_healthy_job_leaves_dumps_without_a_fault() -> None:
    stopped = run_until_stopped(SIXTEEN, [])
    for history in ("pending", "ring"):
        dumps = nccl_dumps(stopped, random.Random(1), history=history)
        assert verdict(named(dumps)).kind is HangKind.NONE


def test_a_rank_that_stops_before_its_first_collective_is_named_from_full_rings() -> None:
    stopped = run_until_stopped(Job(2, 2, 1), [Fault(3, Side.CPU, 1)])
    dumps = nccl_dumps(stopped, random.Random(0), history="ring", ring=2000)
    assert verdict(named(dumps)).culprits == (3,)


@few
@given(seeds)
def test_a_device_that_never_begins_is_named_where_starts_are_recorded(seed: int) -> None:
    rng = random.Random(seed)
    job = Job(tensor=4, data=1, stages=1)
    faults = [Fault(rank, Side.CPU, 9) for rank in range(4)]
    stopped = dataclasses.replace(run_until_stopped(job, faults), completed=[8] * 4)
    dumps = nccl_dumps(stopped, rng, history=rng.choice(["pending", "ring"]))
    odd = rng.randrange(4)
    for rank, dump in dumps.items():
        dump["entries"][-1]["state"] = "scheduled" if rank == odd else "started"
    diagnosis = verdict(named(dumps))
    assert (diagnosis.culprits, diagnosis.kind) == ((odd,), HangKind.GPU_STUCK)


def test_entries_in_any_order_are_read_alike() -> None:
    stopped, injected = stop(7, side=Side.GPU)
    dumps = nccl_dumps(stopped, random.Random(7))
    for dump in dumps.values():
        random.Random(8).shuffle(dump["entries"])
    assert set(verdict(named(dumps)).culprits) == injected


def test_pair_numbers_are_shared_only_where_nobody_else_is_in_between() -> None:
    for stages, shared in ((2, True), (4, False)):
        job = Job(tensor=2, data=2, stages=stages)
        stopped, _ = stop(3, side=Side.CPU, job=job)
        dumps = [
            parse_dump(d, name)
            for name, d in named(nccl_dumps(stopped, random.Random(3), history="ring")).items()
        ]
        channels = _channels(flight_recorder.snapshots(dumps)[0])
        inner = [c for rank, c in channels if 4 <= rank < 4 * (stages - 1) or stages == 2]
        assert inner
        assert all((channel.enqueued is not None) == shared for channel in inner)


def test_a_batch_is_complete_when_its_common_entry_is() -> None:
    def entry(record: int, name: str, state: str) -> dict[str, Any]:
        return {
            "record_id": record,
            "pg_id": 0,
            "process_group": ("7", "PP"),
            "collective_seq_id": 0,
            "p2p_seq_id": 1,
            "profiling_name": f"nccl:{name}",
            "state": state,
            "is_p2p": True,
        }

    config = {"7": {"desc": "PP", "ranks": "[0, 1]"}}
    for state, kind in (("completed", HangKind.NONE), ("scheduled", HangKind.GROUP_STALL)):
        dumps = {
            str(rank): {
                "rank": rank,
                "pg_config": config,
                "entries": [
                    entry(0, f"send {rank}->{1 - rank}", "scheduled"),
                    entry(1, f"recv {rank}<-{1 - rank}", "scheduled"),
                    entry(2, "coalesced", state),
                ],
            }
            for rank in (0, 1)
        }
        assert verdict(dumps).kind is kind


def _channels(snapshots: list[RankSnapshot]) -> list[tuple[int, Channel]]:
    return [(s.rank, channel) for s in snapshots for channel in s.channels]


def test_the_verdict_shows_the_first_line_outside_torch() -> None:
    stopped, injected = stop(5, side=Side.CPU)
    dumps = nccl_dumps(stopped, random.Random(5))
    lines = (("c10d_logger.py", 83, "wrapper"), ("train.py", 24, "step"), ("run.py", 1, "main"))
    frames = [
        {"filename": f"/x/{'torch/' if n == 83 else ''}{f}", "line": n, "name": name}
        for f, n, name in lines
    ]
    for dump in dumps.values():
        for entry in dump["entries"]:
            entry["frames"] = frames
    diagnosis = verdict(named(dumps))
    assert set(diagnosis.culprits) == injected
    assert "at train.py:24 step, in which" in diagnosis.findings[0].explanation


# Which rank wrote which file


@given(seeds)
def test_ranks_come_from_the_content_whatever_the_files_are_called(seed: int) -> None:
    rng = random.Random(seed)
    dumps = nccl_dumps(run_until_stopped(SIXTEEN, []), rng)
    names = [f"host-{rng.randint(0, 99)}_{rng.randint(0, 99)}.{n}" for n in range(16)]
    parsed = [parse_dump(dump, names[rank]) for rank, dump in dumps.items()]
    by_rank, unknown = assign_ranks(parsed)
    assert not unknown
    assert {rank: found[0].source for rank, found in by_rank.items()} == dict(enumerate(names))


@pytest.mark.parametrize(
    "name",
    [
        "_dump_{r}",
        "nccl_trace_rank_{r}",
        "gpu-node17_{r}.pickle",
        "{r}.json",
        "h{h}-rank{r}-4711",
        "run3/host{h}/trace.{r}",
        "rank{r}_of_4",
    ],
)
def test_ranks_come_from_the_names_where_the_content_does_not_tell(name: str) -> None:
    dumps = [parse_dump({"entries": []}, name.format(r=r, h=50 - r // 2)) for r in range(4)]
    by_rank, unknown = assign_ranks(dumps)
    assert not unknown
    assert {r: found[0].source for r, found in by_rank.items()} == {
        r: name.format(r=r, h=50 - r // 2) for r in range(4)
    }


def test_local_ranks_on_two_hosts_are_not_taken_for_global_ones() -> None:
    files = ["alpha_0", "alpha_1", "beta_0", "beta_1"]
    by_rank, unknown = assign_ranks([parse_dump({"entries": []}, name) for name in files])
    assert not by_rank
    assert [dump.source for dump in unknown] == files


def test_the_last_open_dump_goes_to_the_last_open_rank() -> None:
    declared = {"0": {"ranks": "[0, 1, 2]"}}
    own = [{"rank": r, "entries": [], "pg_config": declared} for r in (0, 2)]
    nameless = {"entries": [], "pg_config": declared}
    dumps = [parse_dump(d, n) for d, n in zip([*own, nameless], "abc", strict=True)]
    by_rank, unknown = assign_ranks(dumps)
    assert not unknown
    assert by_rank[1][0].source == "c"


# Files that cannot be trusted


class Nasty:
    """Runs a command when it is unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("echo unpickled",))


def test_a_pickle_that_names_a_function_is_refused_by_name() -> None:
    with pytest.raises(ScoutError, match=r"asks for (posix|nt)\.system"):
        unpickle(pickle.dumps({"entries": [Nasty()]}), "evil")


def test_even_a_harmless_class_is_refused() -> None:
    with pytest.raises(ScoutError, match=r"asks for datetime\.date"):
        unpickle(pickle.dumps(datetime.date(2026, 1, 1)), "date")


@given(st.integers(0, 10**6), st.integers(1, 60))
def test_a_damaged_pickle_is_a_mistake_and_never_another_exception(seed: int, cut: int) -> None:
    rng = random.Random(seed)
    stopped = run_until_stopped(Job(2, 1, 1, steps=1), [])
    data = bytearray(pickled(nccl_dumps(stopped, rng, history="ring"))[0])
    for _ in range(rng.randint(0, 3)):
        data[rng.randrange(2, len(data))] = rng.randrange(256)
    damaged = bytes(data[: -cut or None])
    with pytest.raises(ScoutError, match="file"):
        parse_dump(unpickle(damaged, "file"), "file")


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"entries": 3},
        {"entries": [{}]},
        {"entries": [], "pg_config": {"0": {"ranks": "[0, x]"}}},
        {"entries": [], "pg_status": {"0": {"last_enqueued_collective": None}}},
    ],
)
def test_a_record_of_another_form_is_a_mistake(record: object) -> None:
    with pytest.raises(ScoutError, match="file is not a Flight Recorder dump"):
        parse_dump(record, "file")


def test_a_file_is_read_by_its_content(tmp_path: pathlib.Path) -> None:
    dump = nccl_dumps(run_until_stopped(Job(2, 1, 1), []), random.Random(0), history="ring")[1]
    (tmp_path / "a.json").write_bytes(pickle.dumps(dump, protocol=2))
    (tmp_path / "b.pickle").write_text(json.dumps(dump))
    (tmp_path / "c").write_text("hello")
    a, b = (flight_recorder.read_dump(tmp_path / name) for name in ("a.json", "b.pickle"))
    assert a.entries == b.entries
    with pytest.raises(ScoutError, match="neither a pickle nor JSON"):
        flight_recorder.read_dump(tmp_path / "c")


# Real dumps of a 16-GPU job, where they are at hand


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no labelled dumps in {REAL}; set SCOUT_DATA")
@pytest.mark.parametrize(("name", "side"), [("gpu_error_2nd", "gpu"), ("lock_gil_1st", "cpu")])
def test_the_labelled_dumps_name_exactly_the_injected_ranks(name: str, side: str) -> None:
    folder = REAL / name
    truth = set(ast.literal_eval(re.findall(r"Fault ranks: (.*)", _log(folder))[0]))
    dumps = {path.name: unpickle(path.read_bytes(), path.name) for path in folder.glob("_dump_*")}
    assert all(isinstance(dump, dict) for dump in dumps.values())
    diagnosis = verdict(dumps)  # type: ignore[arg-type]
    assert set(diagnosis.culprits) == truth
    assert diagnosis.side == side
    for lost in dumps:
        rest = verdict({n: d for n, d in dumps.items() if n != lost})  # type: ignore[misc]
        assert set(rest.culprits) == truth - {int(lost.removeprefix("_dump_"))}


def _log(folder: pathlib.Path) -> str:
    return (folder / "fault_injection.log").read_text()


# gloo, as real processes leave it


def dump_of_a_gloo_rank(rank: int, culprit: int, with_pairs: bool) -> tuple[bytes, str]:
    """Run some collectives; then everybody but the culprit enters one more."""
    import time

    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    warnings.simplefilter("ignore")
    x = torch.ones(4)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(x)
    dist.all_reduce(x, group=halves[rank // 2])
    if with_pairs and rank < 2:
        dist.send(x, 1 - rank) if rank == 0 else dist.recv(x, 1 - rank)
    dist.barrier()
    if rank != culprit:
        dist.all_reduce(x, async_op=True)
    time.sleep(0.5)  # what can complete has completed; the verdict does not depend on it
    # Without stacks: torch needs seconds to resolve the first one.
    found = c10d._dump_fr_trace(True, False, False), c10d._dump_fr_trace_json()
    dist.barrier(group=halves[rank // 2])  # nobody leaves while others still dump
    text = found[1].decode() if isinstance(found[1], bytes) else found[1]
    return found[0], text


@pytest.mark.parametrize("with_pairs", [False, True])
def test_real_gloo_dumps_name_the_rank_that_stays_away(with_pairs: bool) -> None:
    culprit = random.Random(with_pairs).randrange(4)
    found = run_ranks(4, dump_of_a_gloo_rank, culprit, with_pairs)
    as_pickle = {f"dump_{r}": unpickle(data, "dump") for r, (data, _) in enumerate(found)}
    as_json = {f"dump_{r}.json": json.loads(text) for r, (_, text) in enumerate(found)}
    for dumps in (as_pickle, as_json):
        diagnosis = verdict(dumps)  # type: ignore[arg-type]
        assert (diagnosis.culprits, diagnosis.kind) == ((culprit,), HangKind.NEVER_ARRIVED)
        assert diagnosis.side == "cpu"


def serve_and_read(rank: int, path: str) -> list[str]:
    """Rank 0 serves its trace; the other reads it while rank 0 waits in a native call."""
    import torch
    import torch.distributed as dist

    server = flight_recorder.serve(path) if rank == 0 else None
    dist.barrier()
    names = []
    if rank == 1:
        trace = flight_recorder.read_live(path, timeout_s=5.0)
        names = [entry["profiling_name"] for entry in trace["entries"]]
    dist.all_reduce(torch.ones(2))
    if server is not None:
        server.shutdown()
    return names


def test_a_live_trace_is_read_from_a_rank_that_waits(tmp_path: pathlib.Path) -> None:
    _, names = run_ranks(2, serve_and_read, str(tmp_path / "socket"))
    assert "gloo:barrier" in names


def test_no_answer_is_a_mistake_with_the_address(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ScoutError, match=r"no trace from .*nobody in 0\.2 s"):
        flight_recorder.read_live(str(tmp_path / "nobody"), timeout_s=0.2)
