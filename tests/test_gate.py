"""Algorithm 3: what is proven, what is condemned, and which checkpoint is chosen."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Choice, Failure, Label, Outcome
from scout_core.errors import ScoutError

SIZES = (1, 2, 5)
SWEEPS = (None, True, False)
unhurried = settings(deadline=None)  # a busy machine is no counterexample
QUESTIONS = list(itertools.product(Failure, (True, False), SWEEPS))


@dataclass
class Algorithm3:
    """The paper's pseudocode, line by line, for one check per save."""

    k: int
    q: int = 0
    latest: int | None = None
    candidate: int | None = None
    verified: int | None = None

    def save(self, step: int) -> None:
        self.latest = step
        self.q += 1
        if self.q == self.k:
            self.q = 0
            self.verified = self.candidate
            self.candidate = self.latest

    def retrieve(self, failure: Failure, reachable: bool, sweep: bool | None) -> int | None:
        if failure in (Failure.SDC, Failure.UNREACHABLE) or not reachable:
            return self.verified
        if failure in (Failure.STRAGGLER, Failure.NONE) or sweep:
            return self.latest
        return self.verified


def run(gate: CheckpointGate, outcomes: str, first: int = 1, save_first: bool = False) -> None:
    """One check and one save per letter: c clean, s straggler, i inconclusive, h hang, x sdc."""
    words = {"c": "clean", "s": "straggler", "i": "inconclusive", "h": "hang", "x": "sdc"}
    for step, letter in enumerate(outcomes, first):
        if save_first:
            gate.on_save(step)
        gate.on_check(step, step % gate.catalog_size, words[letter])
        if not save_first:
            gate.on_save(step)


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("save_first", [False, True])
@unhurried
@given(outcomes=st.text("cs", max_size=24))
def test_one_accepted_check_per_save_is_algorithm_3(
    k: int, save_first: bool, outcomes: str
) -> None:
    gate, paper = CheckpointGate(k), Algorithm3(k)
    for step, letter in enumerate(outcomes, 1):
        run(gate, letter, step, save_first)
        paper.save(step)
        for question in QUESTIONS:
            assert gate.retrieve(*question).step == paper.retrieve(*question)


@pytest.mark.parametrize("k", SIZES)
def test_the_first_cycles_checkpoint_is_verified_after_2k_checks(k: int) -> None:
    gate = CheckpointGate(k)
    run(gate, "c" * (2 * k - 1))
    assert gate.retrieve("sdc") == Choice("none")
    run(gate, "c", first=2 * k)
    assert gate.retrieve("sdc") == Choice("verified", k)


def test_a_cycle_needs_every_recipe_however_often_one_is_repeated() -> None:
    gate = CheckpointGate(2)
    for step in range(1, 9):
        gate.on_check(step, "hidden", "clean")
        gate.on_save(step)
    assert gate.retrieve("sdc").choice == "none"
    gate.on_check(9, "head", "clean")
    gate.on_save(9, "step-9")
    gate.on_check(10, "head", "clean")
    assert gate.candidate == (9, "step-9")
    gate.on_check(11, "hidden", "clean")
    assert gate.retrieve("sdc") == Choice("verified", 9, "step-9")


@pytest.mark.parametrize("k", SIZES)
@unhurried
@given(data=st.data())
def test_any_doubt_between_two_cycles_starts_both_again(k: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, 2 * k - 1))
    doubt = data.draw(st.sampled_from("ihx"))
    gate = CheckpointGate(k)
    run(gate, "c" * position + doubt)
    if doubt == "x":
        gate.on_restart(None)
    run(gate, "c" * (2 * k - 1), first=position + 2)
    assert gate.retrieve("sdc").choice == "none"
    run(gate, "c", first=position + 2 * k + 1)
    assert gate.retrieve("sdc") == Choice("verified", position + 1 + k)


@pytest.mark.parametrize("k", SIZES)
@unhurried
@given(outcomes=st.text("cs", min_size=1, max_size=30))
def test_a_straggler_alone_never_loses_progress(k: int, outcomes: str) -> None:
    gate = CheckpointGate(k)
    run(gate, outcomes)
    assert gate.retrieve("straggler") == Choice("latest", len(outcomes))


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_after_a_corruption_only_the_proven_is_left(
    k: int, question: tuple[Failure, bool, bool | None]
) -> None:
    gate = CheckpointGate(k)
    run(gate, "c" * (2 * k) + "x" + "c" * (3 * k) + "s")
    assert gate.retrieve(*question) == Choice("verified", k)


def test_saves_are_refused_after_a_corruption_and_during_a_hang() -> None:
    gate = CheckpointGate(1)
    run(gate, "cc")
    gate.on_check(3, 0, "hang")
    assert gate.on_save(3) is Label.REFUSED
    assert gate.on_save(2) is Label.UNPROVEN  # an asynchronous save from before the hang
    gate.on_check(4, 0, "sdc")
    assert gate.on_save(4) is Label.CONDEMNED
    assert gate.latest == (2, None)


@unhurried
@given(late=st.integers(0, 6))
def test_a_save_told_late_counts_from_its_own_step(late: int) -> None:
    gate = CheckpointGate(2)
    run(gate, "cccc")
    assert gate.verified == (2, None)
    for step in range(5, 7 + late):
        gate.on_check(step, step % 2, "clean")
    assert gate.on_save(6) is (Label.CANDIDATE if late < 2 else Label.VERIFIED)


def test_a_save_told_late_takes_no_place_that_was_taken_at_its_step() -> None:
    gate = CheckpointGate(2)
    run(gate, "cc")
    for step in (3, 4):
        gate.on_check(step, step % 2, "clean")
    assert gate.verified == (2, None)
    assert gate.on_save(3) is Label.UNPROVEN
    assert gate.on_save(4) is Label.CANDIDATE


@pytest.mark.parametrize(("doubt", "restored"), [("i", "latest"), ("h", "latest")])
def test_a_suspicion_ends_with_a_clean_cycle_or_a_clean_sweep(doubt: str, restored: str) -> None:
    gate = CheckpointGate(2)
    run(gate, "cccc" + doubt + "c")
    assert gate.retrieve("straggler").choice == "verified"
    swept = CheckpointGate.from_state(gate.state())
    swept.on_sweep(clean=True)
    assert swept.retrieve("straggler") == Choice(restored, 6)
    run(gate, "c", first=7)
    assert gate.retrieve("straggler") == Choice(restored, 7)


def test_a_suspicion_does_not_outlive_a_restart_from_the_proven() -> None:
    gate = CheckpointGate(2)
    run(gate, "cccci")
    gate.on_restart(2)
    run(gate, "c", first=3)
    assert gate.retrieve("straggler") == Choice("latest", 3)


def test_a_sweep_that_is_not_clean_condemns_like_a_check() -> None:
    gate = CheckpointGate(1)
    run(gate, "ccc")
    gate.on_sweep(clean=False)
    assert gate.retrieve("straggler") == Choice("verified", 2)


def test_what_is_not_covered_is_uncertified_and_never_verified() -> None:
    gate = CheckpointGate(1, uncovered=["ranks 0 and 1 have no third peer"])
    run(gate, "cccc")
    choice = gate.retrieve("sdc")
    assert choice.choice == "none"
    assert "third peer" in choice.why
    assert gate.uncertified == (3, None)
    assert gate.label(gate.uncertified) is Label.UNCERTIFIED


def test_a_new_world_keeps_the_proven_and_counts_anew() -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccc")
    gate.on_world_changed(3)
    run(gate, "ccccc", first=6)
    assert gate.retrieve("sdc") == Choice("verified", 2)
    run(gate, "c", first=11)
    assert gate.retrieve("sdc") == Choice("verified", 8)


def test_a_machine_lost_in_mid_cycle_leaves_only_the_proven_until_the_restart() -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccc")
    gate.on_unreachable()
    assert gate.on_save(6) is Label.REFUSED
    assert gate.retrieve("straggler") == Choice("verified", 2)
    gate.on_restart(2)
    assert gate.retrieve("straggler") == Choice("latest", 2)


def test_a_restart_in_mid_cycle_takes_the_candidate_back() -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccc")
    assert gate.candidate == (4, None)
    gate.on_restart(5)
    run(gate, "c", first=6)
    assert gate.retrieve("sdc") == Choice("verified", 2)
    assert gate.candidate is None


@pytest.mark.parametrize("before", ["ccccc", ""])
def test_training_on_from_a_condemned_checkpoint_certifies_nothing(before: str) -> None:
    gate = CheckpointGate(1)
    run(gate, before + "xc")
    gate.on_restart(len(before) + 1)
    run(gate, "c" * 6, first=len(before) + 2)
    assert gate.retrieve("straggler").step == (4 if before else None)


def test_saving_again_at_the_candidates_step_keeps_it_the_candidate() -> None:
    gate = CheckpointGate(1)
    run(gate, "c")
    assert gate.on_save(1, "final") is Label.CANDIDATE
    run(gate, "cx", first=2)
    gate.on_restart(1, "final")
    assert gate.retrieve("straggler") == Choice("latest", 1, "final")


def test_saving_again_at_the_proven_step_condemns_nothing_later() -> None:
    gate = CheckpointGate(1)
    run(gate, "c")
    gate.on_check(2, 0, "clean")
    gate.on_check(3, 0, "inconclusive")
    gate.on_save(1, "final")
    gate.on_check(4, 0, "sdc")
    gate.on_restart(1, "final")
    gate.on_sweep(clean=True)
    assert gate.retrieve("straggler") == Choice("latest", 1, "final")


def test_saves_after_the_candidate_are_condemned_when_it_is_proven_first() -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccccx")
    assert gate.verified == (4, None)
    gate.on_restart(5)
    assert gate.retrieve("straggler") == Choice("verified", 4)


def test_a_save_of_an_older_step_means_that_the_job_went_back() -> None:
    gate = CheckpointGate(1)
    run(gate, "cccccx")
    assert gate.on_save(5) is Label.UNPROVEN
    assert gate.retrieve("straggler") == Choice("latest", 5)


def test_what_was_saved_behind_the_point_that_a_job_went_back_to_is_given_up() -> None:
    gate = CheckpointGate(2)
    run(gate, "cccc")
    gate.on_check(3, 1, "clean")
    assert gate.retrieve("straggler") == Choice("latest", 2)


def test_a_planned_stop_is_followed_by_the_latest_unless_something_is_open() -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccc")
    assert gate.retrieve("none") == Choice("latest", 5)
    run(gate, "i", first=6)
    assert gate.retrieve("none") == Choice("verified", 2)


def test_a_checkpoint_that_moved_keeps_its_label() -> None:
    gate = CheckpointGate(1)
    run(gate, "c")
    gate.on_moved(1, None, "disk/step-1")
    run(gate, "c", first=2)
    assert gate.retrieve("sdc") == Choice("verified", 1, "disk/step-1")


def test_a_job_that_went_back_may_save_before_it_checks() -> None:
    gate = CheckpointGate(1)
    run(gate, "ccccc")
    gate.on_restart(3)
    gate.on_save(4)
    gate.on_check(4, 0, "clean")
    assert gate.retrieve("straggler") == Choice("latest", 4)


def test_a_save_before_the_end_of_the_first_cycle_is_no_candidate() -> None:
    gate = CheckpointGate(2)
    gate.on_check(1, 0, "clean")
    gate.on_check(5, 1, "clean")
    assert gate.on_save(4) is Label.UNPROVEN  # asynchronous: its step lies inside the cycle
    assert gate.candidate is None


@pytest.mark.parametrize("told", [True, False])
def test_a_job_that_went_back_to_the_proven_is_trusted_again(told: bool) -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccccx")
    assert gate.retrieve("sdc") == Choice("verified", 4)
    if told:
        gate.on_restart(4)
    run(gate, "cccc", first=5)
    assert gate.retrieve("sdc") == Choice("verified", 6)


def test_going_back_behind_the_proven_gives_it_up() -> None:
    gate = CheckpointGate(1)
    run(gate, "cccc")
    gate.on_restart(1)
    assert gate.retrieve("sdc").choice == "none"
    assert gate.retrieve("straggler") == Choice("latest", 1)


def test_a_path_that_is_written_again_holds_its_former_step_no_more() -> None:
    gate = CheckpointGate(1)
    for step in (1, 2):
        gate.on_check(step, 0, "clean")
        gate.on_save(step, f"slot-{step}")
    assert gate.verified == (1, "slot-1")
    gate.on_save_failed(3, "slot-2")
    assert gate.candidate is None
    gate.on_save(4, "slot-1")
    assert gate.retrieve("sdc").choice == "none"


def test_a_dropped_checkpoint_is_never_chosen() -> None:
    gate = CheckpointGate(1)
    run(gate, "cc")
    gate.forget(1)
    assert gate.retrieve("sdc").choice == "none"


def test_asking_changes_nothing() -> None:
    gate = CheckpointGate(2)
    run(gate, "ccccic")
    before = gate.state()
    for question in QUESTIONS:
        gate.retrieve(*question)
    assert gate.state() == before


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: CheckpointGate(0), "catalog_size=0"),
        (lambda: CheckpointGate(1).on_check(1, 0, "good"), "outcome='good' must be one of clean"),
        (lambda: CheckpointGate(1).retrieve("crash"), "failure='crash' must be one of sdc"),
        (lambda: run(CheckpointGate(1), "c") or CheckpointGate.from_state({}), "catalog_size"),
    ],
)
def test_a_mistake_names_the_value_and_the_rule(mistake, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScoutError, match=message):
        mistake()


def test_when_there_are_more_recipes_than_k_a_cycle_needs_them_all() -> None:
    gate = CheckpointGate(1)
    run(gate, "cc")
    gate.on_check(3, "head", "clean")
    gate.on_save(3)
    for step in range(4, 9):
        gate.on_check(step, 0, "clean")
        gate.on_save(step)
    assert gate.candidate == (4, None)  # the first after a cycle of both
    assert gate.retrieve("sdc") == Choice("verified", 1)
    gate.on_check(9, "head", "clean")
    assert gate.retrieve("sdc") == Choice("verified", 4)


@dataclass
class Proof:
    """Oracle: every accepted check, by recipe, in the run of clean checks it belongs to."""

    accepted: dict[int, list[int]]

    def proves(self, step: int, k: int) -> bool:
        steps = list(self.accepted.values())
        before = sum(any(at <= step for at in each) for each in steps)
        after = sum(any(at > step for at in each) for each in steps)
        return before == after == k


class GateMachine(RuleBasedStateMachine):
    """Random checks, saves, faults and restarts against an oracle that keeps all history."""

    @initialize(k=st.sampled_from(SIZES))
    def begin(self, k: int) -> None:
        self.gate = CheckpointGate(k)
        self.k = k
        self.step = 0
        self.proof = Proof({})
        self.clean_until: dict[int, int] = {}  # last accepted step per recipe, on this time line
        self.bad_from: list[int] = []  # earliest step each seen corruption may have begun at
        self.saved = {0}  # the beginning counts as a save: a job can start over
        self.proven: int | None = None

    @rule(ahead=st.integers(0, 2), data=st.data(), outcome=st.sampled_from(Outcome))
    def check(self, ahead: int, data: st.DataObject, outcome: Outcome) -> None:
        self.observe(self.step + ahead, data.draw(st.integers(0, self.k - 1)), outcome)

    @rule(recipes=st.lists(st.integers(0, 4), min_size=1, max_size=12))
    def clean_checks_with_saves(self, recipes: list[int]) -> None:
        for recipe in recipes:
            self.observe(self.step + 1, recipe % self.k, Outcome.CLEAN)
            self.save(0)

    @rule(recipes=st.permutations(range(5)), laps=st.integers(1, 3))
    def clean_cycles(self, recipes: list[int], laps: int) -> None:
        for recipe in [r for r in recipes if r < self.k] * laps:
            self.observe(self.step + 1, recipe, Outcome.CLEAN)
            self.save(0)

    def observe(self, step: int, recipe: int, outcome: Outcome) -> None:
        self.gate.on_check(step, recipe, outcome)
        self.remember(step, recipe, outcome)

    def remember(self, step: int, recipe: int, outcome: Outcome) -> None:
        self.step = step
        if outcome in (Outcome.CLEAN, Outcome.STRAGGLER):
            if not self.bad_from:
                self.proof.accepted.setdefault(recipe, []).append(step)
                self.clean_until[recipe] = step
            return
        self.proof = Proof({})
        if outcome is Outcome.SDC:
            self.bad_from.append(self.clean_until.get(recipe, 0) + 1)

    @rule(ahead=st.integers(0, 2))
    def saving(self, ahead: int) -> None:
        self.save(ahead)

    def save(self, ahead: int) -> None:
        self.step += ahead
        self.gate.on_save(self.step)
        self.saved.add(self.step)

    @rule()
    def machine_lost(self) -> None:
        self.gate.on_unreachable()
        self.proof = Proof({})

    @rule(question=st.sampled_from(QUESTIONS))
    def restart_from_the_choice(self, question: tuple[Failure, bool, bool | None]) -> None:
        choice = self.gate.retrieve(*question)
        self.gate = CheckpointGate.from_state(json.loads(json.dumps(self.gate.state())))
        assert self.gate.retrieve(*question) == choice
        self.gate.on_restart(choice.step, choice.path)
        self.go_back_to(-1 if choice.step is None else choice.step)

    @rule(data=st.data())
    def restart_from_any_save_untold(self, data: st.DataObject) -> None:
        back = data.draw(st.sampled_from(sorted(self.saved)))
        if back + 1 < self.gate.state()["last_check"]:
            self.gate.on_check(back + 1, 0, Outcome.CLEAN)
            self.go_back_to(back)
            self.remember(back + 1, 0, Outcome.CLEAN)

    def go_back_to(self, step: int) -> None:
        self.proof = Proof({})
        self.clean_until = {r: min(at, max(step, 0)) for r, at in self.clean_until.items()}
        if all(bad > step for bad in self.bad_from) and not self.gate.doubts.condemned:
            self.bad_from = []
        self.step = max(step, 0)
        self.saved = {at for at in self.saved if at <= self.step}

    @invariant()
    def the_proven_lies_between_two_complete_clean_cycles(self) -> None:
        now = None if self.gate.verified is None else self.gate.verified.step
        if now is not None and now != self.proven:
            assert self.proof.proves(now, self.k) or now < (self.proven or 0)
        self.proven = now

    @invariant()
    def no_choice_is_condemned_by_anything_seen(self) -> None:
        for question in QUESTIONS:
            step = self.gate.retrieve(*question).step
            assert step is None or all(step < bad for bad in self.bad_from)

    @invariant()
    def slots_are_in_the_order_of_their_proof(self) -> None:
        gate = self.gate
        steps = [s.step for s in (gate.verified, gate.candidate, gate.latest) if s is not None]
        assert steps == sorted(steps)

    @invariant()
    def the_state_survives_being_written_and_read(self) -> None:
        state = json.loads(json.dumps(self.gate.state()))
        assert CheckpointGate.from_state(state).state() == state


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
