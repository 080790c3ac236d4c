"""SCOUT for Megatron-Core 0.16 - 0.19 and its megatron.training: on with `--scout`.

Importing this package loads neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scout_megatron.attachment import attach
    from scout_megatron.options import add_scout_args

__all__ = ["add_scout_args", "attach"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from scout_megatron.attachment import attach

        return attach
    if name == "add_scout_args":
        from scout_megatron.options import add_scout_args

        return add_scout_args
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
