"""The gate of a job: agreement of all ranks, the record that rank 0 keeps, what may be removed."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scout_core.decision.labels import Choice, Failure, Label, Outcome
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import LocalExchange, LocalHall, run_threads
from scout_core.integration.gate_service import GateService
from scout_core.integration.manifest import Share, problems, read_manifest
from scout_core.integration.places import copy_share
from scout_core.integration.saves import Job, Purge
from scout_core.integration.trust_record import TrustStore

RANKS = 3
Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A folder in memory where there is one: hundreds of fsyncs are not what is tested here."""
    if not pathlib.Path("/dev/shm").is_dir():
        yield tmp_path_factory.mktemp("run")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield pathlib.Path(folder)


def with_service(
    folder: pathlib.Path,
    body: Callable[[GateService], Any],
    job: Job | None = None,
    events: Events | None = None,
    deadline_s: float = 10.0,
    ranks: int = RANKS,
) -> list[Any]:
    """Run `body(service)` on each rank, in threads; results in rank order."""

    def emit(event: str, **fields: Any) -> None:
        if events is not None:
            events.append((event, fields))

    hall = LocalHall(ranks, deadline_s)

    def run(exchange: LocalExchange) -> Any:
        ours = LocalExchange(exchange.rank, hall)
        service = GateService(folder, ours, job or Job(2), emit)
        try:
            return body(service)
        finally:
            service.close()

    return run_threads(ranks, run, 2 * deadline_s + 10)


def write_files(service: GateService, name: str) -> None:
    """Write this rank's file of a checkpoint, as a framework would."""
    folder = service.folder / name
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{service.rank}").write_bytes(bytes([service.rank]) * 100)


def save(service: GateService, step: int, error: str = "") -> Label:
    service.begin_save(step)
    write_files(service, f"step-{step}")
    service.add_pending(step, f"step-{step}", lambda: error)
    return service.settle()[-1].label


def train(service: GateService, outcomes: str, first: int = 1) -> None:
    words = {"c": "clean", "i": "inconclusive", "s": "straggler", "h": "hang"}
    for step, letter in enumerate(outcomes, first):
        service.record(step, step % 2, words[letter])
        save(service, step)


def labels(folder: pathlib.Path) -> dict[int, str]:
    return {entry.step: entry.label.value for entry in TrustStore(folder).load().checkpoints}


def test_all_ranks_choose_the_same_and_the_record_says_why(tmp_path: pathlib.Path) -> None:
    def body(service: GateService) -> Choice:
        train(service, "ccccc")
        return service.choose("sdc").choice

    choices = with_service(tmp_path, body)
    assert choices == [Choice("verified", 2, str(tmp_path / "step-2"))] * RANKS
    assert labels(tmp_path) == {
        1: "unproven",
        2: "verified",
        3: "unproven",
        4: "candidate",
        5: "unproven",
    }
    entry = TrustStore(tmp_path).load().entry("step-2")
    assert entry is not None
    assert "before and in a cycle after" in entry.why


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_groups_corruption_condemns_on_every_rank(tmp_path: pathlib.Path, rank: int) -> None:
    def body(service: GateService) -> tuple[Outcome, Label, Choice]:
        train(service, "ccccc")
        mine = "sdc" if service.rank == rank else "straggler"
        job_wide = service.record(6, 0, mine, incidents=["abc"] if service.rank == 0 else [])
        label = service.begin_save(6).label
        return job_wide, label, service.choose("straggler").choice

    where = str(tmp_path / "step-2")
    expected = (Outcome.SDC, Label.CONDEMNED, Choice("verified", 2, where))
    assert with_service(tmp_path, body) == [expected] * RANKS
    assert labels(tmp_path) == {
        1: "condemned",
        2: "verified",
        3: "condemned",
        4: "condemned",
        5: "condemned",
    }
    assert TrustStore(tmp_path).load().checkpoints[0].incidents == ("abc",)


def test_a_rank_that_does_not_come_in_time_means_no_promotion(tmp_path: pathlib.Path) -> None:
    events: Events = []

    def body(service: GateService) -> tuple[Outcome, str] | None:
        train(service, "ccc")
        if service.rank == 1:
            return None
        return service.record(4, 0, "clean"), service.broken

    results = with_service(tmp_path, body, events=events, deadline_s=0.5)
    assert [result and result[0] for result in results] == [
        Outcome.INCONCLUSIVE,
        None,
        Outcome.INCONCLUSIVE,
    ]
    assert "did not come" in results[0][1]
    assert "verified" not in labels(tmp_path).values()
    assert "no_promotion" in [event for event, _ in events]


def test_ranks_that_speak_of_different_checks_promote_nothing(tmp_path: pathlib.Path) -> None:
    def body(service: GateService) -> tuple[Outcome, str]:
        train(service, "ccc")
        outcome = service.record(4 + (service.rank == 2), 0, "clean")
        return outcome, service.broken

    for outcome, broken in with_service(tmp_path, body):
        assert outcome is Outcome.INCONCLUSIVE
        assert "ranks [2] spoke of" in broken
    assert "verified" not in labels(tmp_path).values()


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_save_that_failed_on_one_rank_is_not_published(tmp_path: pathlib.Path, rank: int) -> None:
    def body(service: GateService) -> tuple[Label, Choice]:
        train(service, "cccc")
        label = save(service, 5, error="disk full" if service.rank == rank else "")
        return label, service.choose("none").choice

    for label, choice in with_service(tmp_path, body):
        assert label is Label.REFUSED
        assert choice.step == 4
    assert 5 not in labels(tmp_path)


def test_an_asynchronous_save_counts_when_the_last_rank_is_done(tmp_path: pathlib.Path) -> None:
    def body(service: GateService) -> list[int | None]:
        train(service, "cc")
        write_files(service, "step-3")
        done: list[str] = []
        service.begin_save(3)
        service.add_pending(3, "step-3", lambda: done[0] if done else None)
        seen = []
        for step in (3, 4, 5):
            if step - 3 == service.rank:
                done.append("")
            service.record(step, step % 2, "clean")
            latest = service.latest
            seen.append(latest and latest.step)
        return seen

    assert with_service(tmp_path, body) == [[2, 2, 3]] * RANKS


def test_saves_end_in_their_order(tmp_path: pathlib.Path) -> None:
    def body(service: GateService) -> list[list[int]]:
        done: list[str] = []
        for step, outcome in ((1, lambda: done[0] if done else None), (2, lambda: "")):
            service.begin_save(step)
            write_files(service, f"step-{step}")
            service.add_pending(step, f"step-{step}", outcome)
        first = [ended.step for ended in service.settle()]
        done.append("")
        return [first, [ended.step for ended in service.settle()]]

    assert with_service(tmp_path, body) == [[[], [1, 2]]] * RANKS


def test_files_are_signed_in_the_background_and_named_in_a_manifest(
    tmp_path: pathlib.Path,
) -> None:
    def body(service: GateService) -> None:
        save(service, 1)
        service.drain()

    with_service(tmp_path, body)
    entry = TrustStore(tmp_path).load().entry("step-1")
    assert entry is not None
    assert [file.name for file in entry.files] == ["rank-0", "rank-1", "rank-2"]
    assert entry.is_signed
    assert read_manifest(tmp_path / "step-1") == (1, entry.saved, entry.files)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_damaged_file_is_noticed_and_the_one_before_is_chosen(
    tmp_path: pathlib.Path, damage: str, rank: int
) -> None:
    def first(service: GateService) -> None:
        train(service, "cccccc")
        service.drain()
        service.stop("sdc")

    with_service(tmp_path, first)
    file = tmp_path / "step-4" / f"rank-{rank}"
    content = bytearray(file.read_bytes())
    content[17] ^= 1
    file.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "delete":
        file.unlink()
    choices = with_service(tmp_path, lambda service: service.choose().choice)
    assert choices == [Choice("verified", 2, str(tmp_path / "step-2"))] * RANKS
    assert labels(tmp_path)[4] == "damaged"


def test_the_failure_comes_from_the_call_then_the_environment_then_the_record(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(service: GateService) -> None:
        train(service, "ccccc")
        service.stop("straggler")

    def failures(service: GateService) -> list[Failure]:
        return [service.choose(failure).failure for failure in ("sdc", None)]

    with_service(tmp_path, first)
    assert with_service(tmp_path, failures)[1] == [Failure.SDC, Failure.STRAGGLER]
    monkeypatch.setenv("SCOUT_FAILURE", "hang")
    assert with_service(tmp_path, failures)[2] == [Failure.SDC, Failure.HANG]
    monkeypatch.setenv("SCOUT_FAILURE", "bad luck")
    with pytest.raises(ScoutError, match=r"\$SCOUT_FAILURE='bad luck' must be one of"):
        with_service(tmp_path, failures)


def test_a_job_that_was_killed_without_a_word_goes_back_to_the_proven(
    tmp_path: pathlib.Path,
) -> None:
    with_service(tmp_path, lambda service: train(service, "ccccc"))
    chosen = with_service(tmp_path, lambda service: service.choose())
    assert chosen[0].failure is Failure.UNKNOWN
    assert chosen[0].choice.step == 2


def test_a_job_says_where_it_goes_on_before_it_saves_again(tmp_path: pathlib.Path) -> None:
    events: Events = []
    with_service(tmp_path, lambda service: train(service, "ccccc"))

    def second(service: GateService) -> None:
        service.record(6, 0, "clean")
        service.begin_save(6)

    with pytest.raises(ScoutError, match=r"session.restore\(\)"):
        with_service(tmp_path, second, events=events)
    assert "gate_waits_for_restore" in [event for event, _ in events]


def test_going_back_abandons_what_is_newer(tmp_path: pathlib.Path) -> None:
    with_service(tmp_path, lambda service: train(service, "ccccc"))

    def second(service: GateService) -> Choice:
        service.resumed(2, str(tmp_path / "step-2"))
        train(service, "c", first=3)
        return service.choose("sdc").choice

    assert with_service(tmp_path, second)[0].step == 2
    assert labels(tmp_path) == {
        1: "unproven",
        2: "verified",
        3: "unproven",
        4: "abandoned",
        5: "abandoned",
    }


def test_a_restart_with_other_recipes_keeps_the_proven(tmp_path: pathlib.Path) -> None:
    with_service(tmp_path, lambda service: train(service, "ccccc"))
    job = Job(5, topology="other")
    choices = with_service(tmp_path, lambda service: service.choose("sdc").choice, job, ranks=2)
    assert [choice.step for choice in choices] == [2, 2]


def test_nothing_is_verified_where_nothing_can_be_replayed(tmp_path: pathlib.Path) -> None:
    def body(service: GateService) -> Choice:
        for step in range(1, 5):
            service.record(step, "none", "clean")
            save(service, step)
        return service.choose("sdc").choice

    choice = with_service(tmp_path, body, Job(0))[0]
    assert choice.choice == "none"
    assert "nothing in this job can be replayed" in choice.why
    assert labels(tmp_path)[3] == "uncertified"


def test_a_purge_leaves_the_trusted_and_the_pinned(tmp_path: pathlib.Path) -> None:
    def first(service: GateService) -> None:
        train(service, "cccccccc")

    def second(service: GateService) -> list[bool]:
        service.resumed(8, str(tmp_path / "step-8"))
        service.settle(Purge(1, remove))
        return [service.protects(f"step-{step}") for step in (1, 6, 8)]

    removed: list[str] = []

    def remove(folder: pathlib.Path) -> None:
        removed.append(folder.name)

    with_service(tmp_path, first)
    assert labels(tmp_path)[6] == "verified"
    TrustStore(tmp_path).update(lambda record: record.changed("step-1", pinned=True))
    answers = with_service(tmp_path, second)
    assert answers[0] == [True, True, True]
    assert answers[1] == [False, True, True]  # pins are known where checkpoints are removed
    assert removed == ["step-2", "step-3", "step-4", "step-5"]
    assert set(labels(tmp_path)) == {1, 6, 7, 8}


def test_a_pin_set_while_the_job_runs_keeps_the_next_purge_away(tmp_path: pathlib.Path) -> None:
    removed: list[str] = []

    def body(service: GateService) -> None:
        train(service, "cccccccc")
        if service.rank == 0:
            TrustStore(tmp_path).update(lambda record: record.changed("step-1", pinned=True))
        service.begin_save(9)
        write_files(service, "step-9")
        service.add_pending(9, "step-9", lambda: "")
        service.settle(Purge(1, lambda folder: removed.append(folder.name)))

    with_service(tmp_path, body)
    assert "step-1" not in removed
    assert "step-2" in removed
    assert 1 in labels(tmp_path)


def test_a_checkpoint_that_moves_takes_its_signatures_and_its_manifest_along(
    tmp_path: pathlib.Path,
) -> None:
    def body(service: GateService) -> None:
        save(service, 1)
        service.drain()
        source, target = tmp_path / "step-1", tmp_path / "moved"
        copy_share(source, target, Share(service.rank, service.num_ranks))
        assert service.first_error("copied", "") == ""
        service.moved(str(source), str(target), shutil.rmtree)

    with_service(tmp_path, body)
    assert not (tmp_path / "step-1").exists()
    entry = TrustStore(tmp_path).load().entry("moved")
    assert entry is not None
    assert entry.is_signed
    assert read_manifest(tmp_path / "moved") == (1, entry.saved, entry.files)
    assert problems(tmp_path / "moved", entry.files) == []


def test_a_checkpoint_that_a_person_drops_leaves_every_ranks_gate(tmp_path: pathlib.Path) -> None:
    dropped = Label.DROPPED

    def body(service: GateService) -> Choice:
        train(service, "cccc")
        if service.rank == 0:
            TrustStore(tmp_path).update(lambda record: record.changed("step-2", label=dropped))
        save(service, 5)
        service.record(6, 0, "clean")
        return service.advise("sdc")

    assert with_service(tmp_path, body) == [Choice("none")] * RANKS


def test_an_unreadable_record_is_the_same_error_on_every_rank(tmp_path: pathlib.Path) -> None:
    with_service(tmp_path, lambda service: train(service, "cc"))
    TrustStore(tmp_path).path.write_text("{")
    errors = []

    def run(exchange: LocalExchange) -> None:
        with pytest.raises(ScoutError, match="scout ckpt rebuild") as caught:
            GateService(tmp_path, exchange, Job(2))
        errors.append(str(caught.value))

    run_threads(RANKS, run)
    assert len(errors) == RANKS


def test_a_record_that_cannot_be_written_does_not_stop_the_job(tmp_path: pathlib.Path) -> None:
    events: Events = []

    def body(service: GateService) -> Choice:
        train(service, "ccc")
        if service.rank == 0:
            TrustStore(tmp_path).path.unlink()
        service.record(4, 0, "clean")
        return service.advise("sdc")

    assert [choice.step for choice in with_service(tmp_path, body, events=events)] == [2] * RANKS
    assert "trust_record_not_written" in [event for event, _ in events]
