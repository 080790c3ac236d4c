"""On PYTHONPATH in tests: install the CPU shim before the first import of Megatron in any process.

Saving a checkpoint spawns processes that import the user's script again without the launcher, so
the launcher cannot be the one to install it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in ("megatron.core", "megatron.training"):
            sys.meta_path.remove(self)
            root = str(pathlib.Path(__file__).resolve().parents[2])
            sys.path.insert(0, root)
            from integration_tests import megatron_shim

            megatron_shim.install()
            sys.path.remove(root)
        return None


sys.meta_path.insert(0, _Finder())
