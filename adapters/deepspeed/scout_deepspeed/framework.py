"""The translation between a DeepSpeed engine and SCOUT: sites, addresses, step boundary, state."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param, is_moe_param_group
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import nn

from scout_core.decision.topology import LayoutName, Topology
from scout_core.evidence.capture import Undo
from scout_core.evidence.coherence import MasterPair
from scout_core.evidence.isolate import Materialised
from scout_core.evidence.rng import RngState, get_rng, set_rng
from scout_core.integration.framework import FrameworkBase, Site, StateUnit
from scout_core.integration.models import Patterns, find_sites, path_class
from scout_core.integration.wrapping import wrap_method
from scout_deepspeed import zero3
from scout_deepspeed.addresses import gather_places, place_of, topology_of
from scout_deepspeed.expert_calls import calls_of
from scout_deepspeed.masters import master_pairs, owned_masters

_TRACKED = "tracked."  # prefix of DeepSpeed's own generators, for model-parallel dropout


class DeepSpeed(FrameworkBase):
    """The Framework of a `DeepSpeedEngine` or `PipelineEngine`."""

    name = "deepspeed"

    def __init__(self, engine: Any, patterns: Patterns, timeout_s: float) -> None:
        """Look at the engine; nothing is changed and nothing communicates.

        Args:
            engine: initialised, with an optimizer.
            timeout_s: limit of the one exchange of addresses at start.

        Raises:
            ScoutError: a pattern that matches nothing.
        """
        self._engine = engine
        self._timeout_s = timeout_s
        self.device = torch.device(engine.device)
        self._sites, self._missing = _sites(engine, patterns)
        self._names = dict(engine.param_names)
        self._missing += master_pairs(engine.optimizer, self._names)[1]

    def topology(self) -> Topology:
        """Addresses of all ranks; a collective call."""
        return topology_of(gather_places(place_of(self._engine), self._timeout_s))

    def sites(self) -> Sequence[Site]:
        return self._sites

    def uncovered(self) -> Sequence[str]:
        return self._missing

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self._engine.basic_optimizer]

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        return isinstance(optimizer, FusedAdam) or super().is_elementwise(optimizer)

    def master_pairs(self) -> Sequence[MasterPair]:
        return master_pairs(self._engine.optimizer, self._names)[0]

    def state_units(self) -> Sequence[StateUnit]:
        """Parameters below stage 3 have replicas, and an optimizer that is not partitioned has."""
        units = _parameter_units(self._engine.module, self._sites)
        optimizer = self._engine.basic_optimizer
        owned = owned_masters(self._engine.optimizer)
        units += [
            StateUnit(f"masters {i}", _with_state(optimizer, master, "master"), has_replicas=False)
            for i, master in enumerate(owned)
        ]
        is_partitioned = bool(owned) or self._engine.zero_optimization()
        return units if is_partitioned else units + _optimizer_units(optimizer)

    def on_step_end(self, hook: Callable[[], None]) -> Undo:
        """Call the hook whenever `global_steps` has grown.

        That includes steps that DeepSpeed skipped for overflow: they had a forward and backward
        pass, and a fault that makes every gradient NaN must not stop the checks with the updates.
        """
        engine = self._engine

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = original(*args, **kwargs)
            if engine.global_steps != before:
                hook()
            return result

        return wrap_method(engine, "train_batch" if hasattr(engine, "grid") else "step", around)

    def before_update(self, hook: Callable[[], None]) -> Undo:
        """Call the hook before `step()` at the end of an accumulation, and before the optimizer.

        The first also comes before steps that overflow, which never reach the optimizer; the
        second also where `step()` is not the caller's: in a PipelineEngine.
        """
        engine = self._engine

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                hook()
            return original(*args, **kwargs)

        unhook, unwrap = super().before_update(hook), wrap_method(engine, "step", around)

        def undo() -> None:
            unwrap()
            unhook()

        return undo

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[Materialised]:
        yield zero3.gathered(list(module.parameters()), self.device)

    def is_sharded(self, module: nn.Module) -> bool:
        return any(
            zero3.is_sharded(parameter) and not zero3.is_resident(parameter)
            for parameter in module.parameters()
        )

    def make_leaf(self, live: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
        if zero3.is_sharded(live):
            return zero3.leaf_of(live, whole)
        return super().make_leaf(live, whole)

    def get_rng(self) -> RngState:
        tracked = get_cuda_rng_tracker().get_states()
        own = {f"{_TRACKED}{name}": state.clone() for name, state in tracked.items()}
        return {**get_rng(self.device), **own}

    def set_rng(self, state: RngState) -> None:
        set_rng(state, self.device)
        tracked = {name: s for name, s in state.items() if name.startswith(_TRACKED)}
        if tracked:
            plain = {name.removeprefix(_TRACKED): s for name, s in tracked.items()}
            get_cuda_rng_tracker().set_states(plain)


def _sites(engine: Any, patterns: Patterns) -> tuple[list[Site], list[str]]:
    if hasattr(engine, "grid"):
        patterns = _stage_patterns(engine.module, patterns)
    sites, missing = find_sites(engine.module, patterns, zero3.whole_shape)
    if hasattr(engine, "grid"):
        by_function = _called_by_function(engine.module)
        missing += [
            f"{site.name} of stage {engine.stage_id} is called through a function, not as a module"
            for site in sites
            if site.module in by_function
        ]
        sites = [site for site in sites if site.module not in by_function]
    return [each for site in sites for each in _with_experts(site)], missing


def _with_experts(site: Site) -> Iterator[Site]:
    """Yield a layer, and each group of experts inside of it as a site among expert replicas."""
    experts = dict(_expert_modules(site.module, ""))
    yield replace(site, apart=tuple(f"{name}." for name in experts))
    for name, module in experts.items():
        kind = path_class(module, "expert", zero3.whole_shape)
        calls = calls_of(module, site.module)
        yield Site(f"{site.name}.{name}", module, "expert", kind, "expert", experts=calls)


def _expert_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules below `module` that hold nothing but experts."""
    for key, child in module.named_children():
        kinds = {is_moe_param(parameter) for parameter in child.parameters()}
        inner = f"{name}.{key}" if name else key
        if kinds == {True}:
            yield inner, child
        elif True in kinds:
            yield from _expert_modules(child, inner)


def _stage_patterns(module: Any, patterns: Patterns) -> Patterns:
    """Find the layers of a pipeline stage, which may have a single one, by the whole pipeline.

    Args:
        module: a `deepspeed.pipe.PipelineModule`; its layers are children named by their number.
    """
    kinds = [getattr(spec, "typename", type(spec)) for spec in module._layer_specs]
    repeated = [i for i, kind in enumerate(kinds) if kinds.count(kind) >= 2]
    here = [str(i) for i in repeated if isinstance(getattr(module, str(i), None), nn.Module)]
    if patterns.layers is None and here:
        patterns = replace(patterns, layers=f"^({'|'.join(map(re.escape, here))})$")
    return replace(patterns, stage=True)


def _called_by_function(module: Any) -> set[nn.Module]:
    """Tied modules that this stage only calls through a `forward_fn`: no hook of theirs runs."""
    called = {each for each in module.forward_funcs if isinstance(each, nn.Module)}
    return {
        child
        for tied in module.tied_modules.values()
        if tied not in called
        for child in tied.modules()
    }


def _parameter_units(module: nn.Module, sites: Sequence[Site]) -> list[StateUnit]:
    owner: dict[nn.Parameter, str] = {}
    for site in sites:
        for parameter in site.module.parameters():
            owner.setdefault(parameter, site.name)
    units: dict[tuple[str, bool], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in module.named_parameters():
        if not zero3.is_sharded(parameter):
            key = owner.get(parameter, "rest"), is_moe_param(parameter)
            units.setdefault(key, []).append((name, parameter.detach()))
    return [
        StateUnit(f"{name} experts", tuple(tensors), "expert")
        if is_expert
        else StateUnit(name, tuple(tensors))
        for (name, is_expert), tensors in units.items()
    ]


def _optimizer_units(optimizer: torch.optim.Optimizer) -> list[StateUnit]:
    """One unit per parameter group of an optimizer that every replica runs whole."""
    units = []
    for i, group in enumerate(optimizer.param_groups):
        tensors = [
            tensor
            for j, parameter in enumerate(group["params"])
            for tensor in _with_state(optimizer, parameter, f"parameter {j}")
        ]
        layout: LayoutName = "expert" if is_moe_param_group(group) else "dense"
        units.append(StateUnit(f"optimizer group {i}", tuple(tensors), layout))
    return units


def _with_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str
) -> tuple[tuple[str, torch.Tensor], ...]:
    """A parameter as the optimizer knows it, and what the optimizer keeps for it."""
    state = sorted(optimizer.state.get(parameter, {}).items())
    kept = [(f"{name} {key}", value) for key, value in state if isinstance(value, torch.Tensor)]
    return ((name, parameter.detach()), *kept)
