"""Megatron's optimizers as SCOUT sees them: torch optimizers, masters and replicated state.

`get_megatron_optimizer` returns a chain of wrappers, usually one for dense and one for expert
parameters; each holds a torch optimizer. Private attributes were checked with megatron-core 0.16.1
and 0.18.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import SGD, Adam
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import nn

from scout_core.evidence.coherence import MasterPair
from scout_core.evidence.optimizer_replay import ELEMENTWISE

Names = Mapping[nn.Parameter, str]


def parts_of(optimizer: Any) -> list[Any]:
    """Return the wrappers that own a torch optimizer, in chain order.

    Args:
        optimizer: a `MegatronOptimizer`; ranks without parameters of a sort have a stub for it.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [part for each in chained for part in parts_of(each)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def is_elementwise(part: Any) -> bool:
    """Tell whether the torch optimizer of a wrapper updates element by element.

    The fused optimizers that Megatron picks where they are installed do. A precision-aware one
    keeps gradients and masters where a replay does not look.
    """
    stock = isinstance(part.optimizer, (*ELEMENTWISE, Adam, SGD))
    return stock and not part.config.use_precision_aware_optimizer


def master_pairs(parts: Sequence[Any], names: Names) -> tuple[list[MasterPair], list[str]]:
    """Return the pairs that this rank can compare, and what it cannot, one sentence each.

    Args:
        names: qualified name by parameter.
    """
    pairs: list[MasterPair] = []
    gaps: list[str] = []
    for part in parts:
        for model, held, master in _triples(part):
            if held is None or master is None or held.shape != master.shape:
                gaps.append(f"{names[model]}: its master weights are kept inside the optimizer")
                continue
            flat, parts_of_pair = held.data.view(-1), ((names[model], held.numel()),)
            pairs.append(MasterPair(flat, master.data.view(-1), parts_of_pair, 1))
    return pairs, _counted(gaps)


def _triples(part: Any) -> Iterator[tuple[nn.Parameter, Any, Any]]:
    """Yield (parameter, what this rank holds of it, its master)."""
    if isinstance(part, DistributedOptimizer):
        groups = part.model_float16_groups, part.shard_float16_groups
        masters = part.shard_fp32_from_float16_groups
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        groups, masters = (part.float16_groups, part.float16_groups), part.fp32_from_float16_groups
    else:
        return
    for models, held, mine in zip(*groups, masters, strict=True):
        yield from zip(models, held, mine, strict=True)


def replicated_state(parts: Sequence[Any]) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """Return, per model parameter, what all its data replicas keep alike: master and moments.

    The distributed optimizer spreads them over the replicas, so there they have a single owner.
    """
    found: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            continue
        master_of = {model: master for model, _, master in _triples(part)}
        model_of = {master: model for model, master in master_of.items()}
        for model, master in master_of.items():
            found[model] = {"master": master.detach()}
        for key, state in part.optimizer.state.items():
            entry = found.setdefault(model_of.get(key, key), {})
            entry |= {n: v for n, v in sorted(state.items()) if isinstance(v, torch.Tensor)}
    return found


def own_state(parts: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return what only this rank holds, by optimizer: its shard of masters and moments."""
    return {
        f"optimizer {i} shard": {
            f"{j}.{key}": value
            for j, (master, state) in enumerate(part.optimizer.state.items())
            for key, value in {"master": master.detach(), **state}.items()
            if isinstance(value, torch.Tensor)
        }
        for i, part in enumerate(parts)
        if isinstance(part, DistributedOptimizer)
    }


def _counted(gaps: Sequence[str]) -> list[str]:
    """Say the first one and how many there are: a model has hundreds of parameters."""
    more = f" (and {len(gaps) - 1} more like it)" if len(gaps) > 1 else ""
    return [f"{gaps[0]}{more}"] if gaps else []
