"""Put a DCP checkpoint back into a model and its optimizer, whatever names it was saved under."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from scout_core.errors import ScoutError

StateDict = dict[str, Any]
Path = tuple[str | int, ...]
_OPTIMIZER_PARTS = {"state", "param_groups"}


def missing_names(state_dict: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Return names that a checkpoint holds and a state dict does not ask for.

    DCP leaves these out in silence: for instance the moments of an optimizer that has not made a
    step since it was built.
    """
    asked = {
        ".".join(map(str, path))
        for key, value in state_dict.items()
        for path in _leaves(value.state_dict() if _is_stateful(value) else value, (key,))
    }
    return sorted(set(metadata.state_dict_metadata) - asked)


@dataclass(frozen=True)
class _Section:
    """What one top-level entry of a checkpoint is."""

    key: str
    """Empty when the checkpoint is a bare model state dict."""
    kind: str  # "model", "optimizer" or "other"
    leaves: Mapping[Path, str]
    """Flat name by the path inside the section."""


class TrainingState:
    """A model and its optimizer as the target of a checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep both; nothing is copied."""
        self._model = model
        self._optimizer = optimizer

    def template(self, metadata: Metadata) -> StateDict:
        """Return a state dict to load into: live model tensors, and room for all the rest.

        Raises:
            ScoutError: the layout cannot be told from the names; pass a state dict instead.
        """
        whole: StateDict = {}
        for section in self._sections(metadata):
            if section.kind == "model":
                values: Any = self._model_state({_name(path) for path in section.leaves})
            else:
                values = self._room_for(section, metadata)
            if section.key:
                whole[section.key] = values
            else:
                whole = values
        return whole

    def apply(self, loaded: StateDict, metadata: Metadata) -> StateDict:
        """Put loaded values in place; return the entries that belong to neither."""
        rest: StateDict = {}
        for section in self._sections(metadata):
            values = loaded[section.key] if section.key else loaded
            if section.kind == "model":
                self._load_model(values)
            elif section.kind == "optimizer":
                self._load_optimizer(values)
            else:
                rest[section.key] = values
        return rest

    def _sections(self, metadata: Metadata) -> list[_Section]:
        if metadata.planner_data is None:
            raise ScoutError(
                "the checkpoint does not say how its names were nested; "
                "pass restore() the state_dict to load into"
            )
        paths: dict[str, Path] = {
            name: tuple(metadata.planner_data[name]) for name in metadata.state_dict_metadata
        }
        if self._is_model(set(paths)):
            return [_Section("", "model", {(name,): name for name in paths})]
        tops: dict[str, dict[Path, str]] = {}
        for name, path in paths.items():
            tops.setdefault(str(path[0]), {})[path[1:]] = name
        found = [_Section(key, self._kind(leaves), leaves) for key, leaves in tops.items()]
        kinds = [section.kind for section in found]
        if kinds.count("model") != 1 or kinds.count("optimizer") > 1:
            raise ScoutError(
                f"the checkpoint's entries {sorted(tops)} do not name the state of one model and "
                "at most one optimizer; pass restore() the state_dict to load into"
            )
        return found

    def _kind(self, leaves: Mapping[Path, str]) -> str:
        if self._is_model({_name(path) for path in leaves}):
            return "model"
        parts = {path[0] for path in leaves if path}
        return "optimizer" if "param_groups" in parts and parts <= _OPTIMIZER_PARTS else "other"

    def _is_model(self, names: set[str]) -> bool:
        plain, canonical = self._model.state_dict(), get_model_state_dict(self._model)
        return names in (set(plain), set(canonical))

    def _model_state(self, names: set[str]) -> StateDict:
        plain = self._model.state_dict()
        return plain if set(plain) == names else get_model_state_dict(self._model)

    def _load_model(self, values: StateDict) -> None:
        if set(values) == set(self._model.state_dict()):
            self._model.load_state_dict(values)
        else:
            set_model_state_dict(self._model, values)

    def _load_optimizer(self, values: StateDict) -> None:
        state = values.get("state", {})
        if all(str(key).isdigit() for key in state):
            numbered = {int(key): value for key, value in state.items()}
            self._optimizer.load_state_dict({**values, "state": numbered})
        else:
            set_optimizer_state_dict(self._model, self._optimizer, values)

    def _room_for(self, section: _Section, metadata: Metadata) -> Any:
        if list(section.leaves) == [()]:
            return _empty(metadata.state_dict_metadata[section.leaves[()]], None)
        owners = self._owners() if section.kind == "optimizer" else {}
        nested: StateDict = {}
        for path, name in section.leaves.items():
            owner = owners.get(str(path[1])) if len(path) > 2 and path[0] == "state" else None
            _put(nested, path, _empty(metadata.state_dict_metadata[name], owner))
        return nested

    def _owners(self) -> dict[str, torch.Tensor]:
        """Parameters by both ways to name them in optimizer state: position and name."""
        groups = self._optimizer.param_groups
        positions = [parameter for group in groups for parameter in group["params"]]
        return {
            **get_model_state_dict(self._model),
            **dict(zip(map(str, range(len(positions))), positions, strict=True)),
        }


def _empty(stored: Any, owner: torch.Tensor | None) -> torch.Tensor | None:
    """Make room for one value; state of a parameter's shape is sharded and placed like it."""
    if not isinstance(stored, TensorStorageMetadata):
        return None  # any other object: DCP puts it there
    dtype = stored.properties.dtype
    if owner is not None and owner.shape == stored.size:
        return torch.empty_like(owner.detach(), dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)


def _put(nested: Any, path: Path, value: Any) -> None:
    """Set a value along a path of keys and list positions, as far as needed making containers."""
    for key, following in itertools.pairwise(path):
        fresh: Any = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            nested.extend([None] * (key + 1 - len(nested)))
            nested[key] = fresh if nested[key] is None else nested[key]
            nested = nested[key]
        else:
            nested = nested.setdefault(key, fresh)
    last = path[-1]
    if isinstance(last, int):
        nested.extend([None] * (last + 1 - len(nested)))
    nested[last] = value


def _leaves(value: Any, path: Path) -> list[Path]:
    """Paths of the values that DCP stores one by one (its own flattening, torch 2.13)."""
    if isinstance(value, Mapping):
        return [leaf for key, each in value.items() for leaf in _leaves(each, (*path, str(key)))]
    if isinstance(value, list) and any(map(_has_parts, value)):
        return [leaf for i, each in enumerate(value) for leaf in _leaves(each, (*path, i))]
    return [path]


def _has_parts(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_parts, value))
    return isinstance(value, torch.Tensor | Mapping)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None))


def _name(path: Path) -> str:
    return ".".join(map(str, path))
