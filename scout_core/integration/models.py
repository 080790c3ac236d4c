"""Find the modules of a model that can be replayed, from its structure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from scout_core.errors import ScoutError
from scout_core.integration.framework import Role, Site

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")


@dataclass(frozen=True)
class Patterns:
    """Regular expressions for qualified names; None finds by structure, "" leaves out."""

    layers: str | None = None
    embedding: str | None = None
    head: str | None = None
    stage: bool = False
    """The model is one pipeline stage: what a pattern does not match here is on another stage."""
    experts: str | None = None
    """Expert stages of a plain PyTorch model; a framework names its own."""


ShapeOf = Callable[[nn.Parameter], tuple[int, ...]]


def plain_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape that the parameter has right now."""
    return tuple(parameter.shape)


def find_sites(
    model: nn.Module, patterns: Patterns, shape_of: ShapeOf = plain_shape
) -> tuple[list[Site], list[str]]:
    """Return the sites in model order, and one sentence for each thing that was not found.

    Hidden layers are the members of containers of repeated blocks: lists, sequences or dicts that
    hold at least 2 modules of one class. What lies outside of them and owns parameters is the
    embedding (first `nn.Embedding`), the head (last module with a matrix, if it is no embedding)
    or another site (a final norm).

    Args:
        shape_of: whole shape of a parameter, for frameworks that take its memory away.

    Raises:
        ScoutError: a pattern is no regular expression, or matches nothing in a whole model.
    """
    layers = _layers(model, patterns)
    inside = {child for layer in layers.values() for child in layer.modules()}
    outside = {
        name: module
        for name, module in model.named_modules()
        if module not in inside and _owns_parameters(module)
    }
    sites = [_site(name, layer, "hidden", shape_of) for name, layer in layers.items()]
    missing = [] if layers else ["no repeated layers found: set `layers` to a pattern"]
    embedding = _pick(outside, patterns, "embedding", _first_embedding(outside))
    head = _pick(outside, patterns, "head", _last_matrix(outside, embedding, shape_of))
    for role, name in (("embedding", embedding), ("head", head)):
        if name is None and getattr(patterns, role) != "":
            missing.append(f"no {role} found: set `{role}` to a pattern, or to '' to leave it out")
    roles: dict[str, Role] = {}
    if embedding:
        roles[embedding] = "embedding"
    if head:
        roles[head] = "head"
    sites += [_site(n, module, roles.get(n, "other"), shape_of) for n, module in outside.items()]
    order = {module: i for i, module in enumerate(model.modules())}
    ordered = sorted(sites, key=lambda site: order[site.module])
    return ordered, [] if patterns.stage else missing


def plain_name(name: str) -> str:
    """Drop what wrappers add to a qualified name, so that it reads as in the user's code."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module below compile and activation-checkpoint wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", getattr(module, "_checkpoint_wrapped_module", None))
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def path_class(module: nn.Module, role: Role, shape_of: ShapeOf = plain_shape) -> str:
    """Name the path class: role, class and a digest of structure, shapes and dtypes."""
    core = unwrapped(module)
    parts = [f"{plain_name(n)}:{type(unwrapped(m)).__name__}" for n, m in core.named_modules()]
    parts += [
        f"{plain_name(n)}:{shape_of(p)}:{p.dtype}:{p.requires_grad}"
        for n, p in core.named_parameters()
    ]
    kind = type(core).__name__.removeprefix("FSDP")
    label = role if role in ("embedding", "head") else f"{role}:{kind}"
    return f"{label}#{_digest(parts)}"


def _digest(parts: list[str]) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())[:6]


def _site(name: str, module: nn.Module, role: Role, shape_of: ShapeOf) -> Site:
    return Site(plain_name(name), module, role, path_class(module, role, shape_of))


def _layers(model: nn.Module, patterns: Patterns) -> dict[str, nn.Module]:
    if patterns.layers is not None:
        return _matching(dict(model.named_modules()), patterns, "layers")
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, container in model.named_modules():
        if container in inside or not isinstance(
            container, nn.ModuleList | nn.ModuleDict | nn.Sequential
        ):
            continue
        repeated = dict(_repeated(name, container))
        found |= repeated
        inside |= {child for layer in repeated.values() for child in layer.modules()}
    return found


def _repeated(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children whose class appears at least twice and that are more than one operation.

    A list of plain linear layers counts; dropouts and activations own nothing to replay.
    """
    children = [(key, child) for key, child in container.named_children() if _has_parameters(child)]
    classes = [type(unwrapped(child)) for _, child in children]
    for key, child in children:
        if classes.count(type(unwrapped(child))) >= 2:
            yield f"{name}.{key}" if name else key, child


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _first_embedding(modules: dict[str, nn.Module]) -> str | None:
    return next((n for n, m in modules.items() if isinstance(unwrapped(m), nn.Embedding)), None)


def _last_matrix(
    modules: dict[str, nn.Module], embedding: str | None, shape_of: ShapeOf
) -> str | None:
    matrices = [
        name
        for name, module in modules.items()
        if name != embedding
        and not isinstance(unwrapped(module), nn.Embedding)
        and any(len(shape_of(p)) == 2 for p in module.parameters(recurse=False))
    ]
    return matrices[-1] if matrices else None


def _pick(
    modules: dict[str, nn.Module], patterns: Patterns, role: str, found: str | None
) -> str | None:
    pattern = getattr(patterns, role)
    if pattern is None:
        return found
    return next(iter(_matching(modules, patterns, role)), None) if pattern else None


def _matching(
    modules: dict[str, nn.Module], patterns: Patterns, field: str
) -> dict[str, nn.Module]:
    pattern = getattr(patterns, field)
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ScoutError(f"{field}={pattern!r} is no regular expression: {error}") from None
    found = {name: module for name, module in modules.items() if search(plain_name(name))}
    if not found and not patterns.stage:
        shown = ", ".join(plain_name(name) for name in list(modules)[:12])
        raise ScoutError(f"{field}={pattern!r} matches no module; there are {shown}, ...")
    return found


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters.

    Raises:
        ScoutError: the model has no parameter.
    """
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ScoutError(
            "the model has no parameters, so there is nothing to compare; pass another"
        )
    return parameter.device
