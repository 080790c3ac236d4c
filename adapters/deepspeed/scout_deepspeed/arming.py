"""Watch for engines to be built, whoever builds them, and attach SCOUT where the JSON asks for it.

Wrapping `deepspeed.initialize` would miss scripts that bound it by name before, and libraries that
build engines themselves. So the constructors of `DeepSpeedEngine` and of its subclasses are
wrapped, and SCOUT attaches after the outermost of them has returned. When DeepSpeed is not imported
yet, an import hook waits for it: arming costs nothing, and does nothing where nobody trains.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ENGINE_MODULE = "deepspeed.runtime.engine"
_DEPTH = "_scout_constructors"  # how many constructors of one engine are running


def arm() -> None:
    """Watch for engines from now on; calling it again changes nothing."""
    module = sys.modules.get(ENGINE_MODULE)
    if module is not None:
        watch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def watch(module: ModuleType) -> None:
    """Wrap the constructors of `DeepSpeedEngine` and all its subclasses, also later ones."""
    base = module.DeepSpeedEngine
    if "__init_subclass__" in vars(base):
        return

    def init_subclass(cls: type[Any], /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _wrap_constructor(cls)

    base.__init_subclass__ = classmethod(init_subclass)
    kinds = [base]
    for kind in kinds:
        _wrap_constructor(kind)
        kinds += kind.__subclasses__()


def _wrap_constructor(kind: type[Any]) -> None:
    if "__init__" not in vars(kind):
        return
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        depth = vars(self).get(_DEPTH, 0)
        block = _early_block(kwargs) if depth == 0 else None
        vars(self)[_DEPTH] = depth + 1
        original(self, *args, **kwargs)
        vars(self)[_DEPTH] = depth
        if depth == 0:
            del vars(self)[_DEPTH]
            _attach(self, block)

    kind.__init__ = init


def _early_block(kwargs: dict[str, Any]) -> Any:
    """Check the block before the engine is built, so that a typing error costs no time."""
    from scout_deepspeed.block import block_of

    config = kwargs.get("config_class")
    return None if config is None else block_of(config)


def _attach(engine: Any, block: Any) -> None:
    from scout_deepspeed.block import block_of

    block = block or block_of(engine._config)
    if block is not None and block.enabled:
        from scout_deepspeed.attach import attach

        attach(engine, block)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of DeepSpeed's engine module, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != ENGINE_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then watches the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        watch(module)
