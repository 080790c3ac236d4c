"""What one check replays: a module call or an optimizer update, behind one small interface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from scout_core.decision.evidence import Signature
from scout_core.decision.expert_replay import Rows
from scout_core.decision.origin import Trace
from scout_core.decision.replay_verdict import BROADCAST, PARAMETERS, Report
from scout_core.decision.vote import Vote
from scout_core.evidence.capture import (
    Arguments,
    Capture,
    Leaf,
    Modes,
    Recorder,
    blank,
    local_of,
    take_apart,
)
from scout_core.evidence.clock import Clock
from scout_core.evidence.exchange import Exchange, Ranks
from scout_core.evidence.folding import signature_of
from scout_core.evidence.optimizer_replay import OptimizerRecorder, updated
from scout_core.evidence.replay import Device, Inputs, Replayed, is_finite, replay, trace
from scout_core.evidence.stand_in import stand_in
from scout_core.integration.expert_calls import ExpertCalls, captured_rows, resized
from scout_core.integration.framework import Framework, Site


class Subject(Protocol):
    """One thing to replay at one check; armed one step before."""

    def vote(self, step: int, recipe: str) -> Vote:
        """Say what this rank holds."""

    def prepare(self, of_source: Vote) -> None:
        """Allocate what the source will send; local, may run out of memory."""

    def receive(self, exchange: Exchange, peers: Ranks, source: int) -> None:
        """Get the source's inputs; all peers call it together (Algorithm 2, line 6)."""

    def run(self, poisoned: bool) -> Report:
        """Repeat the work on what was received; on finite stand-ins when training is poisoned."""

    def trace(self, poisoned: bool) -> Trace:
        """Repeat it once more, and sign what passes between its parts."""

    def close(self) -> None:
        """Disarm, and let go of everything that was captured."""


class ModuleSubject:
    """Replay of one module call."""

    def __init__(self, framework: Framework, site: Site, clock: Clock, repeats: int) -> None:
        self._framework = framework
        self._site = site
        self._repeats = repeats
        self._device = Device(
            framework.whole,
            framework.make_leaf,
            framework.get_rng,
            framework.set_rng,
            clock,
            framework.device,
            framework.gradient_of,
        )
        self._recorder = Recorder(site.module, self._take)
        self._held: Arguments | None = None
        self._inputs: Inputs | None = None

    def vote(self, step: int, recipe: str) -> Vote:
        base = Vote(step, recipe, site=self._site.name)
        if self._recorder.error is not None:
            return replace(base, ready=False, why_not=repr(self._recorder.error), fixable=False)
        capture = self._recorder.capture
        if capture is None:
            why = f"{self._site.name} was not called with gradients in this step"
            return replace(base, ready=False, why_not=why)
        if self._site.module.training is not capture.modes.training:
            return replace(base, ready=False, why_not=f"{self._site.name} changed its mode")
        return self._vote(base, capture)

    def prepare(self, of_source: Vote) -> None:
        capture = self._recorder.capture
        assert capture is not None  # voted ready
        assert self._held is not None
        self._inputs = Inputs(
            self._held,
            copies_for(self._held, of_source),
            of_source.constants,
            [needs for _, _, needs, _ in of_source.leaves],
            {name: state.clone() for name, state in sorted(capture.rng.items())},
            capture.modes,
        )

    def receive(self, exchange: Exchange, peers: Ranks, source: int) -> None:
        assert self._inputs is not None
        for tensor in (*self._inputs.tensors, *self._inputs.rng.values()):
            exchange.broadcast(local_of(tensor), source, peers)

    def run(self, poisoned: bool) -> Report:
        assert self._inputs is not None
        received = signature_of({**dict(enumerate(self._inputs.tensors)), **self._inputs.rng})
        site, inputs = self._site, _inputs_for(self._inputs, poisoned)
        found = replay(site.module, inputs, self._device, self._repeats, site.apart)
        return _report(found, received, self._framework.is_sharded(site.module))

    def trace(self, poisoned: bool) -> Trace:
        assert self._inputs is not None
        site, inputs = self._site, _inputs_for(self._inputs, poisoned)
        return trace(site.module, inputs, self._device, site.layout, site.apart)

    def close(self) -> None:
        self._recorder.close()
        self._recorder.capture = None
        self._held = None
        self._inputs = None

    def _vote(self, base: Vote, capture: Capture) -> Vote:
        self._held = capture.arguments
        return _vote_of(base, self._held, str(capture.modes))

    def _take(self, args: Any, kwargs: Any) -> Capture:
        return Capture(
            take_apart(args, kwargs),
            self._framework.get_rng(),
            Modes.of(self._site.module, self._framework.device),
        )


class ExpertSubject(ModuleSubject):
    """Replay of one call of an expert stage, at the rows it had or at planned ones."""

    def __init__(
        self, framework: Framework, site: Site, calls: ExpertCalls, clock: Clock, repeats: int
    ) -> None:
        super().__init__(framework, site, clock, repeats)
        self._calls = calls
        self.rows: Rows | None = None
        """Rows per local expert to replay; None: those of the captured call."""

    @property
    def was_called(self) -> bool:
        """The stage was called in the step that was recorded."""
        return self._recorder.capture is not None

    def _vote(self, base: Vote, capture: Capture) -> Vote:
        """Planned rows must be equal on all peers; captured ones differ, and the source's count."""
        if capture.arguments.unknown:
            return super()._vote(base, capture)
        planned = "" if self.rows is None else f"{list(self.rows)} rows by "
        rows = self.rows or captured_rows(self._calls, capture.arguments)
        # Captured rows too: what lies beyond them is padding, which kernels may leave undefined.
        self._held = resized(self._calls, capture.arguments, rows)
        vote = _vote_of(base, self._held, str(capture.modes))
        return replace(vote, rows=rows, schedule=f"{planned}{self._calls.kernels!r}")


class OptimizerSubject:
    """Replay of one optimizer update on a slice."""

    def __init__(self, optimizer: torch.optim.Optimizer, round_: int, max_elements: int) -> None:
        self._optimizer = optimizer
        self._recorder = OptimizerRecorder(optimizer, round_, max_elements)
        self._tensors: list[torch.Tensor] = []
        self._constants: tuple[Any, ...] = ()

    def vote(self, step: int, recipe: str) -> Vote:
        base = Vote(step, recipe, site=type(self._optimizer).__name__)
        if self._recorder.error is not None:
            return replace(base, ready=False, why_not=repr(self._recorder.error), fixable=False)
        if self._recorder.arguments is None:
            return replace(base, ready=False, why_not="the optimizer had no gradient to apply")
        return _vote_of(base, self._recorder.arguments, "")

    def prepare(self, of_source: Vote) -> None:
        assert self._recorder.arguments is not None  # voted ready
        self._tensors = copies_for(self._recorder.arguments, of_source)
        self._constants = of_source.constants

    def receive(self, exchange: Exchange, peers: Ranks, source: int) -> None:
        for tensor in self._tensors:
            exchange.broadcast(tensor, source, peers)

    def run(self, poisoned: bool) -> Report:
        arguments = self._recorder.arguments
        assert arguments is not None
        received = signature_of(dict(enumerate(self._tensors)))
        given = stand_ins(self._tensors) if poisoned else self._tensors
        results = []
        finite = True
        for _ in range(2):
            copies = [tensor.clone() for tensor in given]
            (call,), _ = arguments.rebuild(copies, self._constants)
            after = updated(self._optimizer, call)
            finite = finite and all(map(is_finite, after))
            results.append(signature_of(dict(enumerate(after))))
        stages = {BROADCAST: received, "optimizer_update": results[0]}
        return Report(stages, repeatable=results[0] == results[1], finite=finite)

    def trace(self, poisoned: bool) -> Trace:
        return ()  # nothing is exchanged in an element-wise update

    def close(self) -> None:
        self._recorder.close()
        self._recorder.arguments = None
        self._tensors = []


class AbsentSubject:
    """A pipeline stage that has no such module: it takes part in votes only."""

    def vote(self, step: int, recipe: str) -> Vote:
        return Vote(step, recipe, has_site=False)

    def prepare(self, of_source: Vote) -> None:
        return None

    def receive(self, exchange: Exchange, peers: Ranks, source: int) -> None:
        return None

    def run(self, poisoned: bool) -> Report:
        return Report()

    def trace(self, poisoned: bool) -> Trace:
        return ()

    def close(self) -> None:
        return None


def _inputs_for(inputs: Inputs, poisoned: bool) -> Inputs:
    return replace(inputs, tensors=stand_ins(inputs.tensors), poisoned=True) if poisoned else inputs


def stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Replace each tensor by finite values that all peers draw alike."""
    return [stand_in(tensor, seed) for seed, tensor in enumerate(tensors)]


def copies_for(mine: Arguments, of_source: Vote) -> list[torch.Tensor]:
    """Allocate tensors like the source's; where shapes are equal they hold this rank's own values.

    The captured tensors are not overwritten: a suspicion is repeated from the same capture.
    """
    leaves = [Leaf(*leaf) for leaf in of_source.leaves]
    same = [leaf == own for leaf, own in zip(leaves, mine.leaves(), strict=True)]
    return [
        like.clone() if equal else blank(leaf, like)
        for leaf, like, equal in zip(leaves, mine.tensors, same, strict=True)
    ]


def _vote_of(base: Vote, arguments: Arguments, modes: str) -> Vote:
    if arguments.unknown:
        why = f"an argument of {base.site} has type {arguments.unknown}, which cannot be compared"
        return replace(base, ready=False, why_not=why, fixable=False)
    json.dumps(arguments.constants)  # they travel in the vote
    return replace(
        base,
        skeleton=arguments.skeleton,
        modes=modes,
        constants=arguments.constants,
        leaves=tuple(arguments.leaves()),
    )


def _report(found: Replayed, received: Signature, sharded: bool) -> Report:
    stages = {BROADCAST: received, **found.outputs[0]}
    if found.theta is not None:
        stages[PARAMETERS] = found.theta
    return Report(
        stages,
        repeatable=found.outputs[0] == found.outputs[-1],
        finite=found.finite,
        call_s=min(timing.compute_s for timing in found.calls),
        gather_s=found.gather.wall_s if sharded and found.gather is not None else None,
    )
