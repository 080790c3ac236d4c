"""What the trust record means: labels follow the gate, choices avoid damage, purges are safe."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision import trust
from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Failure, Label
from scout_core.decision.trust import Entry, File, Record
from scout_core.errors import ScoutError

words = {"c": "clean", "s": "straggler", "i": "inconclusive", "h": "hang", "x": "sdc"}
histories = st.text("ccccccsihx", max_size=25)


def after(outcomes: str, catalog_size: int = 2, uncovered: tuple[str, ...] = ()) -> Record:
    """One check and one save per letter, each save entered with the label the gate gave it."""
    gate = CheckpointGate(catalog_size, uncovered)
    record = Record(gate.state())
    for step, letter in enumerate(outcomes, 1):
        gate.on_check(step, step % catalog_size, words[letter])
        record = trust.relabel(record, gate, ["incident"] if letter == "x" else [])
        label = gate.on_save(step, f"step-{step}")
        entry = Entry(step, f"step-{step}", label, files=(File("shard", 10, "00"),))
        record = trust.relabel(record.with_entry(entry), gate)
    return record


def labels(record: Record) -> list[Label]:
    return [entry.label for entry in record.checkpoints]


@given(histories, st.sampled_from(Failure), st.booleans(), st.sampled_from([None, True, False]))
def test_with_whole_files_the_record_chooses_as_the_gate_does(
    outcomes: str, failure: Failure, reachable: bool, sweep: bool | None
) -> None:
    record = after(outcomes)
    gate = CheckpointGate.from_state(dict(record.gate))
    assert trust.choose(record, failure, reachable, sweep) == gate.retrieve(
        failure, reachable, sweep
    )


@given(histories, st.sampled_from(Failure), st.sets(st.integers(1, 25)))
def test_no_damaged_or_condemned_checkpoint_is_ever_chosen(
    outcomes: str, failure: Failure, damaged: set[int]
) -> None:
    record = after(outcomes)
    choice = trust.choose(record, failure, is_intact=lambda entry: entry.step not in damaged)
    if choice.path is not None:
        entry = record.entry(choice.path)
        assert entry is not None
        assert entry.step == choice.step
        assert entry.step not in damaged
        assert entry.label not in (Label.CONDEMNED, Label.REFUSED)
        if choice.choice == "verified":
            assert entry.label is Label.VERIFIED


@given(histories, st.integers(1, 3))
def test_a_purge_leaves_everything_that_could_be_chosen(outcomes: str, keep_last: int) -> None:
    record = after(outcomes)
    gone = trust.purgeable(record, keep_last)
    left = record.without(entry.path for entry in gone)
    for failure in Failure:
        assert trust.choose(left, failure) == trust.choose(record, failure)
    assert len(left.checkpoints) <= keep_last + 4
    kept = [entry for entry in left.checkpoints if entry.label is Label.CANDIDATE]
    assert kept == [entry for entry in record.checkpoints if entry.label is Label.CANDIDATE]


@given(histories)
def test_a_record_survives_being_written_and_read(outcomes: str) -> None:
    record = after(outcomes)
    assert Record.from_json(json.loads(json.dumps(record.to_json())), "here") == record


def test_a_corruption_condemns_what_is_not_proven_and_notes_the_incident() -> None:
    record = after("cccccx")
    assert labels(record) == [
        Label.CONDEMNED,
        Label.VERIFIED,
        Label.CONDEMNED,
        Label.CONDEMNED,
        Label.CONDEMNED,
        Label.CONDEMNED,
    ]
    assert record.checkpoints[0].incidents == ("incident",)
    assert record.checkpoints[1].incidents == ()


def test_a_superseded_proof_stays_a_proof() -> None:
    record = after("cccccc")
    assert [entry.step for entry in record.checkpoints if entry.label is Label.VERIFIED] == [2, 4]
    choice = trust.choose(record, "sdc", is_intact=lambda entry: entry.step != 4)
    assert choice.step == 2
    assert "damaged or gone: step-4" in choice.why


def test_what_the_job_went_back_behind_is_abandoned_and_never_chosen() -> None:
    record = trust.abandon(after("cccccc"), newer_than=4)
    assert labels(record)[4:] == [Label.ABANDONED] * 2
    assert trust.choose(record, "straggler").step == 4


def test_uncertified_is_chosen_only_when_accepted() -> None:
    record = after("cccc", uncovered=("no peers",))
    assert trust.choose(record, "sdc").choice == "none"
    assert trust.choose(record, "sdc", accept_uncertified=True).step == 2
    assert trust.choose(record, "straggler").step == 4


def test_pins_drops_and_damage_of_the_file_win_over_the_jobs_record() -> None:
    ours = after("cccc")
    theirs = ours.changed("step-1", pinned=True).changed("step-2", label=Label.DROPPED, why="bad")
    newer = ours.with_entry(Entry(5, "step-5", Label.UNPROVEN))
    merged = trust.merged(newer, theirs)
    assert [entry.pinned for entry in merged.checkpoints] == [True, False, False, False, False]
    assert merged.checkpoints[1].label is Label.DROPPED
    assert trust.choose(merged, "sdc").choice == "none"


def test_in_memory_only_what_is_protected_stays() -> None:
    record = after("ccccccc")
    for entry in record.checkpoints:
        if entry.step in (3, 5, 7):
            record = record.changed(entry.path, path=f"/dev/shm/{entry.path}")
    gate = CheckpointGate.from_state(dict(record.gate))
    gate.on_moved(7, "step-7", "/dev/shm/step-7")
    record = replace(record, gate=gate.state())
    gone = [entry.step for entry in trust.purgeable(record, keep_last=5)]
    assert gone == [3, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "scout.trust/2"}, "scout.trust/2"),
        ({"failure": "bad luck"}, "bad luck"),
        ({"surprise": 1}, "surprise"),
        ({"checkpoints": [{"step": 1}]}, "label"),
        ({"gate": {}}, "catalog_size"),
    ],
)
def test_a_record_of_another_form_is_an_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScoutError, match=message):
        Record.from_json({**after("cc").to_json(), **change}, "here")


def test_steps_and_sizes_are_numbers() -> None:
    plain = after("cc").to_json()
    plain["checkpoints"][0]["step"] = "1"
    with pytest.raises(ScoutError, match="must be integers"):
        Record.from_json(plain, "here")
