"""What a training framework must tell SCOUT. Adapters implement `Framework`; the rest is core.

An adapter translates: it finds sites, addresses and the step boundary, and makes parameters whole.
It holds no rule, starts no process and catches no exception (the session guards every hook).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from scout_core.decision.topology import LayoutName, Topology
from scout_core.evidence.capture import Undo
from scout_core.evidence.coherence import MasterPair
from scout_core.evidence.isolate import Materialised, plain_leaf
from scout_core.evidence.optimizer_replay import ELEMENTWISE
from scout_core.evidence.rng import RngState, get_rng, set_rng
from scout_core.integration.expert_calls import ExpertCalls
from scout_core.integration.restore_state import TrainingState

Role = Literal["hidden", "embedding", "head", "other", "expert"]


@dataclass(frozen=True)
class Site:
    """One module that can be replayed by itself."""

    name: str
    """Qualified name in the model; with virtual pipeline stages the chunk is part of it."""
    module: nn.Module
    role: Role
    path_class: str
    """Equal for sites that run the same code on the same shapes and dtypes."""
    layout: LayoutName = "dense"
    apart: tuple[str, ...] = ()
    """Prefixes of parameter names, as in `module.named_parameters()`, that peers of this layout do
    not share: the experts inside a layer, which are another site."""
    experts: ExpertCalls | None = None
    """Of an expert stage: how its calls carry rows per expert; None when that is not known."""


@dataclass(frozen=True)
class StateUnit:
    """Tensors whose signatures are folded into one for the state audit."""

    name: str
    tensors: tuple[tuple[str, torch.Tensor], ...]
    """(qualified name, local tensor) in an order that is the same on all replicas."""
    layout: LayoutName = "dense"
    has_replicas: bool = True
    """False for state with a single owner: compared with its own past only, not with peers."""


class Framework(Protocol):
    """The contract between a training framework and the session.

    Methods that take part in collectives say so; all others are local. `enter_whole` is called on
    all ranks of a sharding group together, because the session votes first.
    """

    @property
    def name(self) -> str:
        """Name for reports: "pytorch", "torchtitan", ..."""

    @property
    def device(self) -> torch.device:
        """Where parameters are computed."""

    def topology(self) -> Topology:
        """Addresses of all ranks; may communicate, once, at start."""

    def sites(self) -> Sequence[Site]:
        """Modules of this rank that can be replayed, in model order."""

    def uncovered(self) -> Sequence[str]:
        """What cannot be replayed and why, one sentence each."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Optimizers that update this rank's parameters."""

    def state_units(self) -> Sequence[StateUnit]:
        """Parameters and optimizer state as they are now: what replicas (equal but for d) hold
        alike, and what only this rank holds."""

    def on_step_end(self, hook: Callable[[], None]) -> Undo:
        """Call the hook after each optimizer step, once, whatever gradient accumulation does."""

    def before_update(self, hook: Callable[[], None]) -> Undo:
        """Call the hook when all backward passes of a step are done and nothing is updated yet.

        It may be called again in the same step.
        """

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether the update of a slice is the slice of the update."""

    def master_pairs(self) -> Sequence[MasterPair]:
        """Parameters that must equal their masters cast down, outside of updates; always the same.

        Local; called in every step when it is not empty, so it must be cheap.
        """

    def whole(self, module: nn.Module) -> contextlib.AbstractContextManager[Materialised]:
        """Make the module's parameters whole (a collective of its sharding group) and free them."""

    def is_sharded(self, module: nn.Module) -> bool:
        """Tell whether `whole` communicates, so that its time is a communication time."""

    def make_leaf(self, live: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
        """Make the leaf that replay computes with in place of a live parameter."""

    def gradient_of(self, leaf: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a leaf's gradient after one backward pass, wherever fused kernels have put it.

        Args:
            gradient: what autograd returned; it may be a stand-in without a meaning.
        """

    def settle(self) -> None:
        """Finish parameter updates that were put off until the next step needs them.

        Collective; called on all ranks of the job together, after the vote of a check.
        """

    def training_state(self) -> TrainingState | None:
        """Model and optimizer for `session.checkpoint`; None where the framework saves itself."""

    def get_rng(self) -> RngState:
        """Copy the state of all random generators that modules draw from."""

    def set_rng(self, state: RngState) -> None:
        """Put a state back."""


class FrameworkBase(abc.ABC):
    """Defaults that hold for most frameworks: whole parameters, torch's generators."""

    device: torch.device

    @abc.abstractmethod
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """See `Framework`."""

    def before_update(self, hook: Callable[[], None]) -> Undo:
        """Use the first optimizer's public hook."""
        first = self.optimizers()[0]
        return first.register_step_pre_hook(lambda opt, args, kwargs: hook()).remove

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, ELEMENTWISE)

    def master_pairs(self) -> Sequence[MasterPair]:
        return ()

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[Materialised]:
        yield {}

    def is_sharded(self, module: nn.Module) -> bool:
        return False

    def make_leaf(self, live: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
        return plain_leaf(live, whole)

    def gradient_of(self, leaf: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient

    def settle(self) -> None:
        return None

    def training_state(self) -> TrainingState | None:
        return None

    def get_rng(self) -> RngState:
        return get_rng(self.device)

    def set_rng(self, state: RngState) -> None:
        set_rng(state, self.device)

    def uncovered(self) -> Sequence[str]:
        return ()


def after_each_step(optimizer: torch.optim.Optimizer, hook: Callable[[], None]) -> Undo:
    """Call the hook after each `optimizer.step()`, through the public optimizer hook."""
    return optimizer.register_step_post_hook(lambda opt, args, kwargs: hook()).remove
