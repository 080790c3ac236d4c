"""The JSON block "scout" of a DeepSpeed configuration."""

from __future__ import annotations

from typing import Any

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError

KEY = "scout"
PLACE = 'the block "scout" of the DeepSpeed configuration'


class Block(ScoutConfig):
    """What the block holds: a switch, a folder, and the fields of `ScoutConfig`."""

    enabled: bool = False
    """Attach SCOUT to this engine."""
    run_dir: str | None = None
    """Folder for incidents and events; None makes ./scout_runs/<time>."""
    accept_uncertified: bool = False
    """Answer for checkpoints that were clean but cannot be certified, as state has one owner."""


def block_of(config: Any) -> Block | None:
    """Read the block; None when there is none.

    Args:
        config: a `deepspeed.runtime.config.DeepSpeedConfig`, which keeps the user's whole
            configuration in `_param_dict` (checked with deepspeed 0.19.8), whatever its form was.

    Raises:
        ScoutError: not an object, an unknown key or a bad value.
    """
    values = config._param_dict.get(KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ScoutError(
            f'{PLACE} is {values!r}; it must be an object, as in "scout": {{"enabled": true}}'
        )
    return Block.parse(values, PLACE)
