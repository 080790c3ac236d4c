"""The JSON block "scout": what it accepts, and errors that name the key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scout_deepspeed.block import block_of

from scout_core.errors import ScoutError


def config(block: Any) -> Any:
    """What DeepSpeed keeps of a user's configuration."""
    return SimpleNamespace(_param_dict={"train_batch_size": 8, "scout": block})


def test_without_a_block_nothing_is_asked_for() -> None:
    assert block_of(SimpleNamespace(_param_dict={"train_batch_size": 8})) is None


def test_a_block_is_off_unless_it_says_enabled() -> None:
    block = block_of(config({"interval_steps": 5}))
    assert block is not None
    assert (block.enabled, block.interval_steps, block.run_dir) == (False, 5, None)


def test_a_block_holds_all_fields_of_the_core() -> None:
    block = block_of(config({"enabled": True, "hang": {"stall_timeout_s": 5}, "run_dir": "runs"}))
    assert block is not None
    assert (block.enabled, block.hang.stall_timeout_s, block.run_dir) == (True, 5.0, "runs")


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"enable": True}, "enable"),
        ({"enabled": True, "interval": 5}, "interval"),
        ({"enabled": True, "hang": {"timeout_s": 5}}, "hang.timeout_s"),
        ({"enabled": True, "interval_steps": 0}, "interval_steps=0"),
        ({"enabled": True, "interval_steps": "often"}, "interval_steps='often'"),
        ({"enabled": "maybe"}, "enabled='maybe'"),
        (True, "True"),
        ([], r"\[\]"),
    ],
)
def test_a_bad_block_is_refused_with_the_key_and_the_place(block: Any, named: str) -> None:
    with pytest.raises(ScoutError, match=f"{named}.*") as caught:
        block_of(config(block))
    assert 'the block "scout" of the DeepSpeed configuration' in str(caught.value)


def test_the_keys_of_the_block_itself_are_among_the_known_ones() -> None:
    with pytest.raises(ScoutError, match=r"known keys are .*enabled.*run_dir"):
        block_of(config({"enable": True}))
