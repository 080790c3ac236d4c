"""The decision table of docs/checkpoints.md, row by row."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from scout_core.decision.gate import CheckpointGate
from scout_core.decision.labels import Outcome, Saved

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "checkpoints.md"
FIRST_CELL = "seen next"


def table() -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {FIRST_CELL}"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[0], rows[2:]


HEAD, ROWS = table()


class Job:
    """K = 2, one clean check and one save in each of the steps 1 to 6."""

    def __init__(self) -> None:
        self.gate = CheckpointGate(2)
        self.step = 0
        for _ in range(6):
            self.check("clean")
            self.gate.on_save(self.step, f"step-{self.step}")
        assert self.gate.verified == (4, "step-4")
        assert self.gate.candidate == self.gate.latest == (6, "step-6")

    def check(self, outcome: str) -> None:
        self.step += 1
        self.gate.on_check(self.step, self.step % 2, outcome)

    def restart(self, saved: Saved | None) -> None:
        assert saved is not None
        self.gate.on_restart(*saved)
        self.step = saved.step

    def see(self, event: str) -> None:
        gate = self.gate
        events: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "machine lost": gate.on_unreachable,
            "clean sweep": lambda: gate.on_sweep(clean=True),
            "dirty sweep": lambda: gate.on_sweep(clean=False),
            "save failed": lambda: gate.on_save_failed(self.step + 1, "step-7"),
            "world changed": lambda: gate.on_world_changed(2),
            "evidence lost": gate.on_evidence_lost,
            "restart from latest": lambda: self.restart(gate.latest),
            "restart from verified": lambda: self.restart(gate.verified),
            **{each.value: lambda word=each.value: self.check(word) for each in Outcome},
        }
        events[event]()

    def next_save(self) -> str:
        gate = CheckpointGate.from_state(self.gate.state())
        return gate.on_save(self.step + 1, "next").value

    def proven_after(self) -> str:
        before = self.gate.verified
        for checks in range(1, 10):
            self.check("clean")
            self.gate.on_save(self.step, f"new-{self.step}")
            if self.gate.verified != before:
                return str(checks)
        return "never"


QUESTIONS: dict[str, list[tuple[str, bool, bool | None]]] = {
    "sdc, unreachable": [
        *[
            ("sdc", reachable, sweep)
            for reachable in (True, False)
            for sweep in (None, True, False)
        ],
        ("unreachable", True, True),
        ("straggler", False, True),
        ("none", False, None),
    ],
    "straggler, none": [("straggler", True, None), ("none", True, None)],
    "hang, unknown": [("hang", True, None), ("unknown", True, None)],
    "after a clean sweep": [("hang", True, True), ("unknown", True, True)],
    "after a sweep that was not clean": [("hang", True, False), ("unknown", True, False)],
}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_gate_does_what_the_row_says(row: list[str]) -> None:
    job = Job()
    for event in row[0].split(", "):
        job.see(event)
    said = dict(zip(HEAD, row, strict=True))
    assert job.next_save() == said["next save"]
    for column, questions in QUESTIONS.items():
        found = {job.gate.retrieve(*question).choice for question in questions}
        assert found == {said[column]}, column
    assert job.proven_after() == said["proven after"]


def test_the_table_has_every_event_and_every_pair_of_faults() -> None:
    assert [FIRST_CELL, "next save", "proven after", *QUESTIONS] == HEAD
    seen = {row[0] for row in ROWS}
    assert {each.value for each in Outcome} <= seen
    faults = ("straggler", "inconclusive", "hang", "sdc", "machine lost")
    pairs = {tuple(sorted(cell.split(", "))) for cell in seen}
    missing = [
        (one, other)
        for one in faults
        for other in faults
        if one < other and tuple(sorted((one, other))) not in pairs
    ]
    assert missing == []
