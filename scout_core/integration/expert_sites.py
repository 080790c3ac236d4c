"""The expert stages of a model as sites, beside the layers that they are part of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from scout_core.decision.topology import Coordinate
from scout_core.errors import ScoutError
from scout_core.integration.expert_calls import ExpertKernels, PackedCalls
from scout_core.integration.framework import Site
from scout_core.integration.models import path_class, plain_name, unwrapped

KERNELS_ATTRIBUTE = "scout_kernels"


def find_experts(model: nn.Module, pattern: str) -> list[Site]:
    """Return the modules whose names match, as expert stages called with (tokens, counts).

    Raises:
        ScoutError: no regular expression, no such module, or one that does not say in an attribute
            `scout_kernels` who computes it.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ScoutError(f"experts.modules={pattern!r} is no regular expression: {error}") from None
    named = {plain_name(name): module for name, module in model.named_modules()}
    found = {name: m for name, m in named.items() if search(name) and unwrapped(m) is m}
    if not found:
        raise ScoutError(f"experts.modules={pattern!r} matches no module of the model")
    return [_site(name, module) for name, module in found.items()]


def _site(name: str, module: nn.Module) -> Site:
    kernels = getattr(module, KERNELS_ATTRIBUTE, None)
    if not isinstance(kernels, ExpertKernels):
        raise ScoutError(
            f"module {name!r} matches experts.modules but has no attribute {KERNELS_ATTRIBUTE!r}; "
            "set it to a scout_core.integration.expert_calls.ExpertKernels"
        )
    calls = PackedCalls(module, kernels)
    return Site(name, module, "expert", path_class(module, "expert"), "expert", experts=calls)


def with_experts(sites: Sequence[Site], experts: Sequence[Site]) -> list[Site]:
    """Put the expert stages first, and set them apart in the layers that hold them.

    The output of a layer with experts mixes the work of all ranks of its expert group; a stage is
    one rank's own, and equal among its expert replicas.
    """
    inside = {site.module for site in experts}
    return [*experts, *(replace(site, apart=_names(site.module, inside)) for site in sites)]


def _names(module: nn.Module, inside: set[nn.Module]) -> tuple[str, ...]:
    """Prefixes, in `module`, of the parameters of the modules that lie inside of it."""
    return tuple(f"{name}." for name, child in module.named_modules() if child in inside)


def as_data_ranks(places: Sequence[Coordinate]) -> list[Coordinate]:
    """Return the addresses for dense work where experts are carved out of the data ranks.

    Ranks of an expert group hold other experts, and are shards (without shards, replicas) of dense
    parameters.
    """
    size = 1 + max(place.e for place in places)
    axis = "s" if any(place.s for place in places) else "d"
    return [
        place._replace(e=0, **{axis: getattr(place, axis) * size + place.e}) for place in places
    ]
