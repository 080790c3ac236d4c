"""The modules of a Megatron model that can be replayed by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import megatron.core
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from scout_core.errors import ScoutError
from scout_core.integration.expert_calls import ExpertKernels, PackedCalls
from scout_core.integration.framework import Role, Site
from scout_core.integration.models import Patterns, path_class

LAYERS = (BaseTransformerLayer, MambaLayer)
HEAD = "output_layer"
Named = dict[str, nn.Module]


def unwrapped(chunk: nn.Module) -> Any:
    """Return the model below DDP and the mixed-precision wrapper, which call it `module`."""
    while isinstance(inner := chunk._modules.get("module"), nn.Module):
        chunk = inner
    return chunk


def prefix_of(index: int, num_chunks: int) -> str:
    """Return what a virtual pipeline chunk adds to the names of its modules."""
    return f"chunk{index}." if num_chunks > 1 else ""


def find_sites(models: Sequence[nn.Module], patterns: Patterns) -> tuple[list[Site], list[str]]:
    """Return the sites of all chunks of this rank in model order, and what is left out and why.

    Args:
        models: chunks without their wrappers.

    Raises:
        ScoutError: a pattern is no regular expression.
    """
    sites: list[Site] = []
    for index, model in enumerate(models):
        prefix = prefix_of(index, len(models))
        sites += [replace(s, name=f"{prefix}{s.name}") for s in _of_chunk(model, patterns)]
    config: Any = models[0].config
    reason = why_not_replayed(config)
    if reason:
        return [], [f"layers, embedding and output are not replayed: {reason}"]
    missing = []
    if config.defer_embedding_wgrad_compute:
        sites = [site for site in sites if site.role != "head"]
        missing.append(f"{HEAD}: --defer-embedding-wgrad-compute computes its gradient elsewhere")
    return sites, missing


def why_not_replayed(config: Any) -> str:
    """Say which mode keeps state outside the modules that a replay would change; empty if none.

    Args:
        config: a `TransformerConfig` of megatron-core 0.16 - 0.19.
    """
    modes = {
        "fp8 keeps its scaling history outside the layers": config.fp8,
        "fp4 keeps its scaling history outside the layers": config.fp4,
        "CUDA graphs replace the layers' code": config.cuda_graph_impl != "none",
        "--delay-wgrad-compute queues weight gradients": config.delay_wgrad_compute,
        "--overlap-moe-expert-parallel-comm takes the layers apart": (
            config.overlap_moe_expert_parallel_comm
        ),
        "activations are offloaded to the CPU": (
            config.cpu_offloading or config.fine_grained_activation_offloading
        ),
    }
    return next((reason for reason, is_on in modes.items() if is_on), "")


def _of_chunk(model: nn.Module, patterns: Patterns) -> Iterator[Site]:
    named = dict(model.named_modules())
    layers = _layers(named, patterns.layers)
    embedding = _picked(named, patterns.embedding, LanguageModelEmbedding, None)
    head = _picked(named, patterns.head, nn.Module, HEAD)
    roles: dict[str, Role] = dict.fromkeys(layers, "hidden")
    roles |= dict.fromkeys(embedding, "embedding")
    roles |= dict.fromkeys(head, "head")
    left_out = {n for n in _defaults(named) if n not in roles and not _is_above(n, roles)}
    for name, module in named.items():
        if any(_is_above(above, [name]) for above in (*roles, *left_out)):
            continue
        if name in roles:
            yield from _with_experts(name, module, roles[name])
        elif name not in left_out and next(module.parameters(recurse=False), None) is not None:
            yield Site(name, module, "other", path_class(module, "other"))


def kernels_of(experts: Any) -> ExpertKernels:
    """Say who computes the experts of a layer on this rank.

    Args:
        experts: a `SequentialMLP`, `GroupedMLP` or `TEGroupedMLP`.
    """
    config, kind = experts.config, type(experts)
    activation = getattr(config.activation_func, "__name__", repr(config.activation_func))
    gated = "gated" if config.gated_linear_unit else "plain"
    return ExpertKernels(
        library=f"{kind.__module__.partition('.')[0]} {kind.__name__}",
        version=megatron.core.__version__,
        settings=f"{gated} {activation}, bias {config.add_bias_linear}",
        dtype=str(config.params_dtype).removeprefix("torch."),
        in_features=config.hidden_size,
        out_features=config.moe_ffn_hidden_size,
        num_experts=experts.num_local_experts,
        grouped="Grouped" in kind.__name__,
    )


def _defaults(named: Named) -> list[str]:
    """Embedding and head by structure: a pattern of "" leaves them out, with all they hold."""
    return [n for n, m in named.items() if n == HEAD or isinstance(m, LanguageModelEmbedding)]


def _is_above(name: str, others: Iterable[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in others)


def _layers(named: Named, pattern: str | None) -> list[str]:
    found = (
        [name for name, module in named.items() if isinstance(module, LAYERS)]
        if pattern is None
        else _matching(named, "layers", pattern)
    )
    return [name for name in found if not any(_is_above(other, [name]) for other in found)]


def _picked(
    named: Named, pattern: str | None, kind: type[nn.Module], name: str | None
) -> list[str]:
    if pattern is None:
        return [n for n, m in named.items() if isinstance(m, kind) and name in (None, n)]
    return _matching(named, name or "embedding", pattern)[:1]


def _matching(named: Named, field: str, pattern: str) -> list[str]:
    """Names that match; on a pipeline stage a pattern may match nothing."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ScoutError(f"{field}={pattern!r} is no regular expression: {error}") from None
    return [name for name in named if pattern and name and search(name)]


def _with_experts(name: str, module: nn.Module, role: Role) -> Iterator[Site]:
    """Yield a layer's experts, then the layer.

    The output of a whole MoE layer mixes the work of all ranks of its expert group; the experts
    between dispatch and combine are one rank's own, and equal among its expert replicas.
    """
    inside = {
        f"{below}.experts".lstrip("."): moe.experts
        for below, moe in module.named_modules()
        if isinstance(moe, BaseMoELayer)
    }
    for below, experts in inside.items():
        kind = path_class(experts, "expert")
        calls = PackedCalls(experts, kernels_of(experts), per_row=("permuted_probs",))
        yield Site(f"{name}.{below}", experts, "expert", kind, "expert", experts=calls)
    apart = tuple(f"{below}." for below in inside)
    yield Site(name, module, role, path_class(module, role), apart=apart)
