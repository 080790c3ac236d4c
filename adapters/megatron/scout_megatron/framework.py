"""The translation between a Megatron job and SCOUT: sites, addresses, step boundary, state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from scout_core.decision.topology import Topology
from scout_core.evidence.capture import Undo
from scout_core.evidence.coherence import MasterPair
from scout_core.evidence.isolate import Materialised
from scout_core.evidence.rng import RngState, get_rng, set_rng
from scout_core.integration.framework import FrameworkBase, Site, StateUnit
from scout_core.integration.models import Patterns, model_device
from scout_core.integration.wrapping import wrap_method
from scout_megatron import replaying
from scout_megatron.addresses import gather_places, place_of, topology_of
from scout_megatron.optimizers import (
    is_elementwise,
    master_pairs,
    own_state,
    parts_of,
    replicated_state,
)
from scout_megatron.sites import find_sites, prefix_of, unwrapped

_TRACKED = "tracked."  # prefix of Megatron's own generators, for tensor-parallel dropout


class Megatron(FrameworkBase):
    """The Framework of the model chunks and the optimizer of one rank."""

    name = "megatron"

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, patterns: Patterns, timeout_s: float
    ) -> None:
        """Look at model and optimizer; nothing is changed and nothing communicates.

        Args:
            chunks: this rank's, each wrapped by Megatron's DistributedDataParallel.
            optimizer: a `MegatronOptimizer`, whose `step()` ends an iteration.
            timeout_s: limit of the one exchange of addresses at start.

        Raises:
            ScoutError: a pattern is no regular expression.
        """
        self._overlapping = [chunk for chunk in chunks if _puts_gathering_off(chunk)]
        self._unsettled = False
        self._models = [unwrapped(chunk) for chunk in chunks]
        self._optimizer = optimizer
        self._parts = parts_of(optimizer)
        self._timeout_s = timeout_s
        self.device = model_device(chunks[0])
        self._fused = bool(self._models[0].config.gradient_accumulation_fusion)
        self._sites, self._missing = find_sites(self._models, patterns)
        self._names = {
            parameter: f"{prefix_of(i, len(chunks))}{name}"
            for i, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
        }
        self._missing += master_pairs(self._parts, self._names)[1]
        self._before_step: list[Callable[[], None]] = []
        self._after_step: list[Callable[[], None]] = []
        self._unwrap: Undo | None = None
        self.skipped_steps = 0
        """Iterations whose update was skipped because a gradient was not finite."""

    def topology(self) -> Topology:
        """Addresses of all ranks; a collective call."""
        return topology_of(gather_places(place_of(self._models[0]), self._timeout_s))

    def sites(self) -> Sequence[Site]:
        return self._sites

    def uncovered(self) -> Sequence[str]:
        return self._missing

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [part.optimizer for part in self._parts]

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(p.optimizer is optimizer and is_elementwise(p) for p in self._parts)

    def master_pairs(self) -> Sequence[MasterPair]:
        return master_pairs(self._parts, self._names)[0]

    def state_units(self) -> Sequence[StateUnit]:
        """Whole parameters with the state that replicas hold alike, and this rank's own shards.

        Parameters whose gathering was put off are not at rest: they are left out until `settle`.
        """
        own = [
            StateUnit(name, tuple(tensors.items()), has_replicas=False)
            for name, tensors in own_state(self._parts).items()
        ]
        return own if self._unsettled else [*self._replicated_units(), *own]

    def _replicated_units(self) -> list[StateUnit]:
        state = replicated_state(self._parts)
        owner: dict[nn.Parameter, str] = {}
        for site in self._sites:
            for parameter in site.module.parameters():
                owner.setdefault(parameter, site.name)  # experts come before the layer they are in
        layouts = {site.name: site.layout for site in self._sites}
        units: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for parameter, name in self._names.items():
            unit = units.setdefault(owner.get(parameter, "rest"), [])
            unit.append((name, parameter.detach()))
            unit += [(f"{name}.{key}", v) for key, v in state.get(parameter, {}).items()]
        return [
            StateUnit(name, tuple(tensors), layouts.get(name, "dense"))
            for name, tensors in units.items()
        ]

    def on_step_end(self, hook: Callable[[], None]) -> Undo:
        """Call the hook after the outer optimizer's step, which runs once in every iteration.

        The torch optimizers below it run once per sort of parameter, and not at all when the update
        is skipped. A skipped iteration computed forward and backward, so it is checked and counted.
        """
        return self._hooked(self._after_step, hook)

    def before_update(self, hook: Callable[[], None]) -> Undo:
        return self._hooked(self._before_step, hook)

    def _hooked(self, hooks: list[Callable[[], None]], hook: Callable[[], None]) -> Undo:
        if self._unwrap is None:
            self._unwrap = wrap_method(self._optimizer, "step", self._step)
        hooks.append(hook)

        def undo() -> None:
            hooks.remove(hook)
            if self._unwrap is not None and not self._before_step and not self._after_step:
                self._unwrap()
                self._unwrap = None

        return undo

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for hook in tuple(self._before_step):
            hook()
        result = original(*args, **kwargs)
        self._unsettled = bool(self._overlapping)
        self.skipped_steps += not result[0]
        for hook in tuple(self._after_step):
            hook()
        return result

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[Materialised]:
        with replaying.prepared(module):
            yield {}

    def make_leaf(self, live: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
        return replaying.leaf_of(live, whole, self._fused)

    def gradient_of(self, leaf: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return replaying.gradient_of(leaf, gradient)

    def settle(self) -> None:
        """Gather the parameters that --overlap-param-gather leaves to the next forward pass."""
        for chunk in self._overlapping if self._unsettled else ():
            chunk.start_param_sync(force_sync=True)
        self._unsettled = False

    def get_rng(self) -> RngState:
        tracked = get_cuda_rng_tracker().get_states()
        own = {f"{_TRACKED}{name}": _copied(state) for name, state in tracked.items()}
        return {**get_rng(self.device), **own}

    def set_rng(self, state: RngState) -> None:
        set_rng(state, self.device)
        tracker = get_cuda_rng_tracker()
        current = tracker.get_states()
        for name in current:
            saved = state[f"{_TRACKED}{name}"]
            if isinstance(current[name], torch.Generator):  # with --te-rng-tracker or CUDA graphs
                current[name].set_state(saved)
            else:
                current[name] = saved.clone()
        if current:
            tracker.set_states(current)


def _puts_gathering_off(chunk: Any) -> bool:
    config = chunk.ddp_config
    return bool(config.use_distributed_optimizer and config.overlap_param_gather)


def _copied(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()
