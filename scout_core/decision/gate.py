"""Which checkpoint can be trusted: Algorithm 3 as a total state machine.

The gate stores nothing: it is told of checks, saves and faults, labels the newest checkpoints and
answers which one to restart from. With one clean check per save it is the paper's algorithm; what
the paper leaves open is settled by docs/checkpoints.md, row by row, always on the careful side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

from scout_core.decision.labels import Choice, Failure, Label, Outcome, Saved, word
from scout_core.errors import ScoutError

Recipe = int | str


class Span(NamedTuple):
    """How long one recipe has been accepted since the count began."""

    first: int
    """Step of its first acceptance."""
    last: int
    """Newest step that an acceptance speaks for: its own, or an earlier one."""


@dataclass(frozen=True)
class Doubts:
    """What is open against the state that training goes on with."""

    condemned: bool = False
    """Corruption was seen; ends when the job restarts from a checkpoint older than all of it."""
    unreachable: bool = False
    """A machine is gone; ends with the restart."""
    suspicious: bool = False
    """Something was not clean; ends after a complete clean cycle or a clean sweep."""
    hang_step: int | None = None
    """Step of a hang that no accepted check has followed yet."""


class CheckpointGate:
    """Algorithm 3. `verified` lies between two complete clean cycles, or is None.

    A cycle is complete when each of the K recipes was accepted; any doubt in between starts both
    cycles again and takes the candidate back. Checks and saves are placed by their optimizer step,
    not by the order of the calls, so an asynchronous save may be told late.
    """

    def __init__(self, catalog_size: int, uncovered: Sequence[str] = ()) -> None:
        """Start with no checkpoint.

        Args:
            catalog_size: K, the number of recipes of one cycle.
            uncovered: what no check sees, one sentence each; then nothing is called verified.

        Raises:
            ScoutError: K < 1.
        """
        self.latest: Saved | None = None
        self.candidate: Saved | None = None
        self.verified: Saved | None = None
        self.uncertified: Saved | None = None
        """What would be verified if everything were covered."""
        self.doubts = Doubts()
        self._last_check = -1
        self._last_save = -1
        self._after_proof: int | None = None  # oldest save that nothing proves
        self._after_candidate: int | None = None
        self._free_since = -1  # step of the check that proved the candidate before
        self._set_world(catalog_size, uncovered)

    @property
    def catalog_size(self) -> int:
        """K: recipes of one cycle."""
        return self._catalog_size

    @property
    def uncovered(self) -> tuple[str, ...]:
        """What no check sees."""
        return self._uncovered

    @property
    def last_check(self) -> int:
        """Step of the newest check; an earlier one means that the job went back."""
        return self._last_check

    @property
    def last_save(self) -> int:
        """Step of the newest save; an earlier one means that the job went back."""
        return self._last_save

    @property
    def accepted(self) -> tuple[Recipe, ...]:
        """Recipes of the cycle under way: those after the candidate, or towards the first one."""
        after = -1 if self.candidate is None else self.candidate.step
        return tuple(recipe for recipe, span in self._clean.items() if span.last > after)

    def on_check(
        self, step: int, recipe: Recipe, outcome: Outcome | str, proven_step: int | None = None
    ) -> None:
        """Take in the job-wide outcome of one recipe's check, its state audit included.

        Args:
            step: optimizer step at whose end the check ran.
            proven_step: last step that an acceptance speaks for; None: all that were executed. A
                recipe that takes several checks speaks for what was executed before the first.

        Raises:
            ScoutError: an unknown outcome.
        """
        outcome = word(Outcome, outcome, "outcome")
        if step < self._last_check:
            self._rewind_before(step)
        self._last_check = step
        if outcome in (Outcome.CLEAN, Outcome.STRAGGLER):
            self._accept(step, recipe, step if proven_step is None else proven_step)
        elif outcome is Outcome.SDC:
            self._doubt(replace(self.doubts, condemned=True))
        elif outcome is Outcome.HANG:
            self._doubt(replace(self.doubts, suspicious=True, hang_step=step))
        else:
            self._doubt(replace(self.doubts, suspicious=True))

    def on_save(self, step: int, path: str | None = None) -> Label:
        """Take in a checkpoint whose files are complete on every rank; return its label.

        REFUSED and CONDEMNED ones are not remembered (Algorithm 3, lines 3-4).
        """
        if step < self._last_save:
            self._rewind_before(step)
        self._last_save = step
        self._lose_path(path, step)
        again = self.candidate is not None and self.candidate.step == step
        if self._after_candidate is None and not again:
            self._after_candidate = step
        if self._after_proof is None and step > self._proof_step:
            self._after_proof = step
        label = self._refusal(step)
        if label is not None:
            return label
        self.latest = Saved(step, path)
        self.candidate = self.latest if again else self.candidate
        self._adopt(self.latest)
        self._promote()
        return self.label(self.latest)

    def on_save_failed(self, step: int, path: str | None = None) -> None:
        """A save did not complete: whatever it was writing over is no longer there."""
        self._lose_path(path, None)

    def on_unreachable(self) -> None:
        """A machine is gone, with the state it held."""
        self._doubt(replace(self.doubts, unreachable=True))

    def on_evidence_lost(self) -> None:
        """What was seen so far is not known any more."""
        self._doubt(replace(self.doubts, suspicious=True))

    def on_sweep(self, clean: bool) -> None:
        """The whole catalogue was replayed at once (Algorithm 3, lines 17-20)."""
        if clean:
            self.doubts = replace(self.doubts, suspicious=False, hang_step=None)
        else:
            self._doubt(replace(self.doubts, condemned=True))

    def on_restart(self, step: int | None, path: str | None = None) -> None:
        """The job runs again from the checkpoint of `step`; None: from the beginning.

        Both cycles start again, and newer checkpoints belong to a run that is given up. Corruption
        stays held against the job unless the checkpoint is older than all that it condemns.
        """
        resumed = None if step is None else self._known(step, path)
        self._rewind_before(0 if step is None else step + 1)
        self.doubts = replace(self.doubts, unreachable=False, hang_step=None)
        if not self.doubts.condemned:
            self.latest = resumed
        if resumed == self.verified:
            self.doubts = replace(self.doubts, suspicious=False)

    def on_world_changed(self, catalog_size: int, uncovered: Sequence[str] = ()) -> None:
        """Ranks, recipes or coverage changed: proofs are counted anew, proven state stays."""
        self._set_world(catalog_size, uncovered)
        self._start_again()

    def on_moved(self, step: int, path: str | None, new_path: str) -> None:
        """A checkpoint lies somewhere else now."""
        for name in _SLOTS:
            if getattr(self, name) == (step, path):
                setattr(self, name, Saved(step, new_path))

    def forget(self, step: int, path: str | None = None) -> None:
        """Never choose this checkpoint again: it was dropped or damaged."""
        self._clear(self._known(step, path))

    def retrieve(
        self,
        failure: Failure | str,
        reachable: bool = True,
        sweep_clean: bool | None = None,
    ) -> Choice:
        """Choose the checkpoint to restart from (Algorithm 3, lines 12-20); changes nothing.

        What was seen before counts as much as `failure`: the more careful of both decides.

        Args:
            reachable: every machine of the job answers.
            sweep_clean: result of replaying the whole catalogue; None when that was not possible,
                which is treated like corruption wherever the sweep would decide.
        """
        newest, why = self.allows_newest(failure, reachable, sweep_clean)
        if newest and self.latest is not None:
            return Choice("latest", *self.latest, why=why)
        if self.verified is not None:
            return Choice("verified", *self.verified, why=why)
        return Choice("none", why=f"{why}; no checkpoint lies between two clean cycles")

    def allows_newest(
        self,
        failure: Failure | str,
        reachable: bool = True,
        sweep_clean: bool | None = None,
    ) -> tuple[bool, str]:
        """Tell whether the newest may be taken, or only a proven one, and why (see `retrieve`)."""
        failure = word(Failure, failure, "failure")
        gaps = f"; not covered: {'; '.join(self._uncovered)}" if self._uncovered else ""
        if failure is Failure.SDC or self.doubts.condemned:
            return False, f"corruption was seen{gaps}"
        if failure is Failure.UNREACHABLE or self.doubts.unreachable or not reachable:
            return False, f"a machine is gone with the state it held{gaps}"
        harmless = failure in (Failure.STRAGGLER, Failure.NONE)
        if harmless and not self.doubts.suspicious:
            return True, "nothing that was seen speaks against the state"
        if sweep_clean:
            return True, "a replay of the whole catalogue was clean"
        if sweep_clean is None:
            return False, f"only a replay of the whole catalogue could clear newer state{gaps}"
        return False, f"the replay of the whole catalogue was not clean{gaps}"

    def label(self, saved: Saved) -> Label:
        """Return the label of a checkpoint that the gate remembers; UNPROVEN for others."""
        if saved == self.verified:
            return Label.VERIFIED
        if saved == self.uncertified:
            return Label.UNCERTIFIED
        return Label.CANDIDATE if saved == self.candidate else Label.UNPROVEN

    def state(self) -> dict[str, Any]:
        """Return everything the gate knows, as JSON values."""
        slots = {name: getattr(self, name) for name in _SLOTS}
        return {
            "catalog_size": self._catalog_size,
            "uncovered": list(self._uncovered),
            "recipes": sorted(self._recipes, key=str),
            "clean": [[recipe, *span] for recipe, span in self._clean.items()],
            **{name: None if saved is None else list(saved) for name, saved in slots.items()},
            "doubts": asdict(self.doubts),
            **{name: getattr(self, f"_{name}") for name in _STEPS},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Rebuild the gate from `state()`.

        Raises:
            ScoutError: a field is missing or has the wrong form; nothing is guessed.
        """
        try:
            gate = cls(state["catalog_size"], state["uncovered"])
            gate._recipes = set(state["recipes"])
            gate._clean = {recipe: Span(*steps) for recipe, *steps in state["clean"]}
            for name in _SLOTS:
                saved = state[name]
                setattr(gate, name, None if saved is None else Saved(*saved))
            gate.doubts = Doubts(**state["doubts"])
            for name in _STEPS:
                setattr(gate, f"_{name}", state[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ScoutError(
                f"the gate's state cannot be read ({error!r}); use `scout ckpt rebuild`"
            ) from error
        return gate

    def _set_world(self, catalog_size: int, uncovered: Sequence[str]) -> None:
        if catalog_size < 1:
            raise ScoutError(
                f"catalog_size={catalog_size} must be >= 1; "
                "a job in which nothing is replayed passes 1 and says so in `uncovered`"
            )
        self._catalog_size = catalog_size
        self._uncovered = tuple(uncovered)
        self._recipes: set[Recipe] = set()
        self._clean: dict[Recipe, Span] = {}

    def _doubt(self, doubts: Doubts) -> None:
        self.doubts = doubts
        self._start_again()

    def _start_again(self) -> None:
        self._clean = {}
        self._free_since = -1
        self.candidate = None
        self._after_candidate = None

    def _accept(self, step: int, recipe: Recipe, proven_step: int) -> None:
        if recipe not in self._recipes and len(self._recipes) >= self._catalog_size:
            self._start_again()  # the catalogue is larger than anybody said
        self._recipes.add(recipe)
        if self.doubts.condemned or self.doubts.unreachable:
            return
        first = self._clean.get(recipe, Span(step, step)).first
        self._clean[recipe] = Span(first, proven_step)
        self.doubts = Doubts(suspicious=self.doubts.suspicious and not self._is_cycle_complete)
        self._promote()
        if self.latest is not None and self.latest.step == step:
            self._adopt(self.latest)

    @property
    def _proof_step(self) -> int:
        proven = (self.verified, self.uncertified)
        return max((saved.step for saved in proven if saved is not None), default=-1)

    @property
    def _is_cycle_complete(self) -> bool:
        """Each of the K recipes was accepted; when more than K were seen, all of them."""
        return len(self._clean) >= max(self._catalog_size, len(self._recipes))

    def _adopt(self, saved: Saved) -> None:
        """Make it the candidate if a complete clean cycle ends no later than its step."""
        if self.candidate is not None or not self._is_cycle_complete:
            return
        cycle_end = max(span.first for span in self._clean.values())
        if max(cycle_end, self._free_since) <= saved.step:
            self.candidate = saved
            self._after_candidate = None

    def _promote(self) -> None:
        """Prove the candidate if every recipe was accepted after its step (lines 8-9)."""
        if self.candidate is None or not self._is_cycle_complete:
            return
        if min(span.last for span in self._clean.values()) <= self.candidate.step:
            return
        if self._uncovered:
            self.uncertified = self.candidate
        else:
            self.verified = self.candidate
        self._after_proof = self._after_candidate
        self._free_since = self._last_check
        self.candidate = None

    def _refusal(self, step: int) -> Label | None:
        if self.doubts.condemned:
            return Label.CONDEMNED
        hang_step = self.doubts.hang_step
        hangs = hang_step is not None and step >= hang_step
        return Label.REFUSED if self.doubts.unreachable or hangs else None

    def _rewind_before(self, step: int) -> None:
        """Training does this step again: what was saved at or after it is given up."""
        older = [saved for saved in self._slots() if saved.step < step]
        self._start_again()
        if self._after_proof is None or self._after_proof >= step:
            self.doubts = replace(self.doubts, condemned=False)
            self._after_proof = None
        self.verified = self.verified if self.verified in older else None
        self.uncertified = self.uncertified if self.uncertified in older else None
        self.latest = max(older, key=lambda saved: saved.step, default=None)
        self._last_check = min(self._last_check, step - 1)
        self._last_save = min(self._last_save, step - 1)

    def _lose_path(self, path: str | None, step: int | None) -> None:
        """Forget what lay at a path that is written again for another step."""
        for saved in self._slots():
            if path is not None and saved.path == path and saved.step != step:
                self._clear(saved)

    def _clear(self, gone: Saved) -> None:
        for name in _SLOTS:
            if getattr(self, name) == gone:
                setattr(self, name, None)
        if self.latest is None:
            self.latest = max(self._slots(), key=lambda saved: saved.step, default=None)

    def _slots(self) -> list[Saved]:
        slots = (getattr(self, name) for name in _SLOTS)
        return [saved for saved in slots if saved is not None]

    def _known(self, step: int, path: str | None) -> Saved:
        """Find a checkpoint by its step; the path decides only when it is given."""
        for saved in self._slots():
            if saved.step == step and path in (None, saved.path):
                return saved
        return Saved(step, path)


_SLOTS = ("latest", "candidate", "verified", "uncertified")
_STEPS = ("last_check", "last_save", "after_proof", "after_candidate", "free_since")
