"""The checkpoint gate of a job: the same state machine on every rank, its record kept by rank 0.

Frameworks write checkpoints; this labels them, says whether one may be taken, which ones must not
be removed and which one to start from. `integration.checkpoint` and the adapters build on it.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import xxhash

from scout_core.decision import trust
from scout_core.decision.gate import CheckpointGate, Recipe
from scout_core.decision.labels import Choice, Failure, Label, Outcome, Saved, word
from scout_core.decision.trust import Entry, File, Record
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import Exchange
from scout_core.integration import manifest
from scout_core.integration.agreement import Agreement, Part
from scout_core.integration.manifest import Share
from scout_core.integration.record_keeper import Emit, Signer, open_record
from scout_core.integration.saves import Chosen, Ended, Job, Pending, Plan, Purge, RemoveFiles
from scout_core.integration.trust_record import TrustStore

FAILURE_VARIABLE = "SCOUT_FAILURE"


class GateService:
    """Takes in what each rank sees of checks and saves, and moves only when all ranks agree.

    Methods marked "collective" are called by all ranks in the same order. When a rank does not
    come in time nothing is promoted any more, and the job goes on.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        exchange: Exchange,
        job: Job,
        emit: Emit = lambda event, **fields: None,
    ) -> None:
        """Open or begin the record of a folder; collective.

        Raises:
            ScoutError: the record cannot be read, or the ranks do not come together.
        """
        self.folder = pathlib.Path(folder).absolute()
        self._emit = emit
        self._agreement = Agreement(exchange)
        self._signer = Signer(Share(self._agreement.rank, self._agreement.num_ranks), emit)
        self._pending: deque[Pending] = deque()
        self._ended: list[Ended] = []
        self._said: set[str] = set()
        self._intact: set[str] = set()  # read back whole since the last start
        opened = open_record(TrustStore(self.folder), self._agreement, job, emit)
        self._keeper = opened.keeper
        self._machines_gone = opened.machines_gone
        self._gate = CheckpointGate.from_state(dict(opened.record.gate))
        self.coverage_changed(job.catalog_size, job.uncovered)
        self._failure = opened.record.failure
        self.has_resumed = not opened.record.checkpoints
        """Whether it is known which step training goes on from; it is in an empty folder."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._agreement.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self._agreement.num_ranks

    @property
    def broken(self) -> str:
        """Why nothing is promoted any more; empty while ranks agree."""
        return self._agreement.broken

    @property
    def pending(self) -> tuple[Pending, ...]:
        """Saves that were begun and have not ended, oldest first."""
        return tuple(self._pending)

    def record(
        self,
        step: int,
        recipe: Recipe,
        outcome: Outcome | str,
        incidents: Iterable[str] = (),
        proven_step: int | None = None,
    ) -> Outcome:
        """Take in this rank's outcome of one recipe's check; collective.

        Args:
            step: optimizer step at whose end the check ran.
            outcome: what this rank knows; the gravest of all ranks counts for the job.
            incidents: identifiers to note on checkpoints that this condemns.
            proven_step: see `CheckpointGate.on_check`.

        Returns:
            The job's outcome: INCONCLUSIVE when the ranks cannot agree in time.
        """
        mine = word(Outcome, outcome, "outcome")
        if not self.has_resumed:
            self._say_once("gate_waits_for_restore", folder=str(self.folder))
            return mine
        subject = {"round": "check", "step": step, "recipe": recipe}
        parts = self._round(subject, {"outcome": mine.value})
        told = [] if parts is None else [Outcome(part["outcome"]) for part in parts]
        job_wide = Outcome.gravest(told or [mine, Outcome.INCONCLUSIVE])
        if self._keeper is not None and step < self._gate.last_check:
            self._keeper.abandon(newer_than=step - 1)
        self._gate.on_check(step, recipe, job_wide, proven_step)
        self._write(incidents)
        return job_wide

    def begin_save(self, step: int, path: str = "") -> Plan:
        """Say what label a checkpoint of this step would get now; collective.

        CONDEMNED and REFUSED mean: do not take it (Algorithm 3, lines 3-4).

        Args:
            path: where rank 0 would put it; all ranks are told rank 0's.

        Raises:
            ScoutError: the folder holds an earlier run and nobody said where this one goes on.
        """
        if not self.has_resumed:
            raise ScoutError(
                f"{self.folder} holds checkpoints of an earlier run; say where this one goes on "
                "before its first save: session.restore(), or resumed(step) after your own load, "
                "or name an empty folder"
            )
        parts = self._round({"round": "save", "step": step}, {"path": path})
        trial = CheckpointGate.from_state(self._gate.state())
        return Plan(trial.on_save(step), path if parts is None else str(parts[0]["path"]))

    def add_pending(self, step: int, path: str, outcome: Callable[[], str | None]) -> None:
        """Watch a save that was begun on all ranks; it counts once it has ended on all of them.

        Args:
            path: where it lies; inside the folder it is known by its relative path.
            outcome: None while running, "" when this rank's files are complete, else the error.
        """
        self._pending.append(Pending(step, self.name(path), outcome))

    def settle(self, purge: Purge | None = None) -> list[Ended]:
        """Exchange how pending saves stand; return those that ended since then; collective.

        Every other round does the same in passing.

        Args:
            purge: what to remove now that newer checkpoints are complete.
        """
        self._round({"round": "settle"}, {})
        self._write(purge=purge)
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until all files are signed, and enter the signatures; collective."""
        self._signer.wait()
        self._round({"round": "signed"}, {})
        self._write()

    def choose(
        self,
        failure: Failure | str | None = None,
        reachable: bool | None = None,
        sweep_clean: bool | None = None,
        accept_uncertified: bool = False,
    ) -> Chosen:
        """Choose the checkpoint to start from, and read all its files back first; collective.

        Args:
            failure: why; None takes $SCOUT_FAILURE of rank 0, or what the record says.
            reachable: None compares the machines with those of the earlier run, where it matters.

        Raises:
            ScoutError: an unknown failure, or the ranks do not come together.
        """
        wanted = None if failure is None else word(Failure, failure, "failure").value
        keeper = self._keeper
        record = None if keeper is None else trust.relabel(keeper.record, self._gate).to_json()
        mine = {"record": record, "failure": os.environ.get(FAILURE_VARIABLE, "")}
        parts = self._must({"round": "choose", "failure": wanted}, mine)
        named = wanted or parts[0]["failure"] or self._failure.value
        why = word(Failure, named, f"failure or ${FAILURE_VARIABLE}")
        if reachable is None:
            reachable = why not in (Failure.HANG, Failure.UNKNOWN) or not self._machines_gone
        agreed = Record.from_json(parts[0]["record"], "of rank 0")
        choice = trust.choose(
            agreed,
            why,
            reachable,
            sweep_clean,
            self._is_intact,
            accept_uncertified,
        )
        self._write()
        return Chosen(self._absolute(choice), why, len(agreed.checkpoints))

    def advise(self, failure: Failure | str, sweep_clean: bool | None = None) -> Choice:
        """Choose from what this rank knows, without reading files: for incidents; local."""
        return self._absolute(self._gate.retrieve(failure, sweep_clean=sweep_clean))

    def resumed(self, step: int | None, path: str | None = None) -> None:
        """Training goes on from the checkpoint of `step`; None: from the beginning; collective."""
        name = None if path is None else self.name(path)
        self._gate.on_restart(step, name)
        self.has_resumed = True
        self._intact.clear()
        self._failure = Failure.UNKNOWN
        if self._keeper is not None:
            self._keeper.abandon(newer_than=-1 if step is None else step)
        self._write(failure=Failure.UNKNOWN)

    def swept(self, clean: bool) -> None:
        """The whole catalogue was replayed, with this job-wide result; called on all ranks."""
        self._gate.on_sweep(clean)
        self._write()

    def stop(self, failure: Failure | str, reachable: bool = True) -> Choice:
        """Note why the job stops, for the next start; called on all ranks, waits for none."""
        why = word(Failure, failure, "failure")
        if why is Failure.UNREACHABLE or not reachable:
            self._gate.on_unreachable()
        self._failure = why
        self._write(failure=why)
        return self.advise(why)

    def coverage_changed(self, catalog_size: int, uncovered: Iterable[str]) -> None:
        """Recipes, groups or machines are others than before; called on all ranks."""
        gaps = tuple(uncovered)
        if catalog_size == 0:
            gaps = (*gaps, "nothing in this job can be replayed")
        self._gate.on_world_changed(max(1, catalog_size), gaps)

    def tell(self, about: str, mine: Part) -> list[Part] | None:
        """Return what every rank says, in rank order; None when they do not meet; collective."""
        return self._round({"round": about}, mine)

    def first_error(self, about: str, error: str) -> str:
        """Tell how this rank fared; return the first rank's error, empty if none; collective."""
        parts = self._round({"round": about}, {"error": error})
        if parts is None:
            return self.broken
        return next((str(part["error"]) for part in parts if part["error"]), "")

    def proven_or_candidate(self) -> list[Saved]:
        """Return the checkpoints that must outlive the machine's memory."""
        slots = (self._gate.candidate, self._gate.verified, self._gate.uncertified)
        return [saved for saved in slots if saved is not None]

    @property
    def proven(self) -> Saved | None:
        """The newest checkpoint between two clean cycles, certified or not."""
        found = (self._gate.verified, self._gate.uncertified)
        return max((s for s in found if s is not None), key=lambda s: s.step, default=None)

    @property
    def latest(self) -> Saved | None:
        """The newest checkpoint of this run."""
        return self._gate.latest

    def protects(self, path: str | os.PathLike[str]) -> bool:
        """Tell whether a purge must leave this checkpoint alone; local. Rank 0 knows pins, too."""
        name = self.name(path)
        if self._keeper is not None:
            return name in trust.protected(self._keeper.record)
        gate = self._gate
        slots = (gate.latest, gate.candidate, gate.verified, gate.uncertified)
        return any(saved is not None and saved.path == name for saved in slots)

    def moved(self, path: str, new_path: str, remove_files: RemoveFiles) -> None:
        """A checkpoint was copied to `new_path` and counts there; called on all ranks.

        Args:
            remove_files: deletes the former files, when nothing of rank 0 uses them any more.
        """
        old, new = self.name(path), self.name(new_path)
        for saved in (self._gate.latest, self._gate.candidate):
            if saved is not None and saved.path == old:
                self._gate.on_moved(saved.step, old, new)
        if self._keeper is not None:
            self._keeper.moved(old, new, remove_files)
        self._write()

    def name(self, path: str | os.PathLike[str]) -> str:
        """Return how the record knows a path: relative inside the folder, else absolute."""
        full = self.folder / path
        inside = full.is_relative_to(self.folder)
        return full.relative_to(self.folder).as_posix() if inside else str(full)

    def close(self) -> None:
        """Wait for background work; local."""
        self._signer.close()
        if self._keeper is not None:
            self._keeper.close()

    def _round(self, subject: Part, mine: Part) -> list[Part] | None:
        """Hold one round, and settle in passing whatever all ranks know now."""
        digest = xxhash.xxh3_64_hexdigest(json.dumps(self._gate.state()).encode())
        saves = [pending.outcome() for pending in self._pending]
        dropped = [] if self._keeper is None else self._keeper.dropped()
        common = {"saves": saves, "signed": self._signer.take(), "dropped": dropped}
        about = {**subject, "gate": digest, "saves": len(saves)}
        parts = self._agreement.round(about, {**mine, **common})
        if parts is None:
            self._say_once("no_promotion", why=self.broken)
            return None
        for step, path in parts[0]["dropped"]:
            self._gate.forget(step, path)
        self._end_saves([part["saves"] for part in parts])
        if self._keeper is not None:
            for part in parts:
                for path, files in part["signed"]:
                    self._keeper.add_signatures(path, [File(*file) for file in files])
        return parts

    def _absolute(self, choice: Choice) -> Choice:
        path = None if choice.path is None else str(self.folder / choice.path)
        return replace(choice, path=path)

    def _must(self, subject: Part, mine: Part) -> list[Part]:
        parts = self._round(subject, mine)
        if parts is None:
            raise ScoutError(f"the ranks do not agree on a checkpoint: {self.broken}")
        return parts

    def _end_saves(self, by_rank: list[list[str | None]]) -> None:
        """End pending saves in their order, as far as they have ended on every rank."""
        for outcomes in zip(*by_rank, strict=True):
            if None in outcomes:
                return
            pending = self._pending.popleft()
            errors = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text]
            self._ended.append(self._end(pending, "; ".join(errors)))

    def _end(self, pending: Pending, error: str) -> Ended:
        step, path, _ = pending
        if error:
            self._gate.on_save_failed(step, path)
            self._emit("save_failed", path=path, error=error)
            return Ended(step, path, Label.REFUSED, error)
        if self._keeper is not None and step < self._gate.last_save:
            self._keeper.abandon(newer_than=step - 1)
        label = self._gate.on_save(step, path)
        if self._keeper is not None:
            self._keeper.enter(step, path, label, list(map(str, self._gate.accepted)))
        self._signer.start(path, self.folder / path)
        return Ended(step, path, label)

    def _is_intact(self, entry: Entry) -> bool:
        """Read this rank's share of the files; a checkpoint counts when all ranks find theirs."""
        if entry.path in self._intact:
            return True
        share = Share(self.rank, self.num_ranks)
        found = manifest.problems(self.folder / entry.path, entry.files, share)
        parts = self._must({"round": "files", "path": entry.path}, {"problems": found})
        problems = [problem for part in parts for problem in part["problems"]]
        if problems:
            self._gate.forget(entry.step, entry.path)
            why = "; ".join(sorted(set(problems))[:4])
            self._emit("checkpoint_damaged", path=entry.path, problems=why)
            if self._keeper is not None:
                self._keeper.mark(entry.path, Label.DAMAGED, why)
            return False
        self._intact.add(entry.path)
        return True

    def _write(
        self,
        incidents: Iterable[str] = (),
        failure: Failure | None = None,
        purge: Purge | None = None,
    ) -> None:
        if self._keeper is not None:
            self._keeper.write(self._gate, incidents, failure, purge)

    def _say_once(self, event: str, **fields: Any) -> None:
        if event not in self._said:
            self._said.add(event)
            self._emit(event, **fields)
