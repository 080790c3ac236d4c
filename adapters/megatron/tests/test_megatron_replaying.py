"""What a replay switches off and puts back, on modules that look like Megatron's."""

from __future__ import annotations

import pathlib
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core.utils", reason="megatron-core is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core
    from scout_megatron.replaying import (
        RECOMPUTE_SWITCHES,
        auxiliary_losses,
        gradient_of,
        leaf_of,
        prepared,
    )

UNPACKED = pathlib.Path(__file__).parents[3] / ".cache" / "megatron" / "megatron-core-0.18.2"
SOURCES = [pathlib.Path(megatron.core.__file__).parent, UNPACKED / "megatron" / "core"]
INSIDE_LAYERS = ("transformer", "ssm", "tensor_parallel", "fusions", "extensions")
HOLDS_A_CHECKPOINT = re.compile(r"_checkpoint$|_norm_checkpoint$")
"""Attributes that hold the recomputation itself, while its switch is on."""


@pytest.mark.parametrize("source", SOURCES, ids=["installed", "0.18.2"])
def test_every_switch_that_makes_a_layer_recompute_is_known(source: pathlib.Path) -> None:
    if not source.exists():
        pytest.skip("megatron-core 0.18.2 is not unpacked: make megatron-next")
    found = {
        name
        for folder in INSIDE_LAYERS
        for file in (source / folder).rglob("*.py")
        if file.name != "transformer_config.py"
        for name in re.findall(r"self\.(\w*(?:recompute|checkpoint)\w*)\s*=[^=]", file.read_text())
    }
    switches = {name for name in found if not HOLDS_A_CHECKPOINT.search(name)}
    assert switches <= set(RECOMPUTE_SWITCHES)


class Dispatcher:
    """Keeps what it saw last, as Megatron's token dispatchers do."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)
        self.recompute_mlp = True
        self.recompute_input_layernorm = False
        self.token_dispatcher = Dispatcher()
        self.weight = None
        self.gradient_accumulation_fusion = True


def test_a_replay_leaves_switches_dispatchers_and_logs_as_they_were() -> None:
    layer, log, seen = Layer(), auxiliary_losses(), torch.ones(3)
    layer.token_dispatcher.seen = seen
    values = torch.tensor([1.0])
    log["load_balancing_loss"] = {"values": values}
    with prepared(layer):
        assert not layer.recompute_mlp
        assert not layer.gradient_accumulation_fusion
        layer.token_dispatcher.seen = torch.zeros(1)
        layer.token_dispatcher.more = 1  # type: ignore[attr-defined]
        assert dict(log) == {}
        log["load_balancing_loss"] = {"values": torch.tensor([7.0])}
    assert layer.recompute_mlp
    assert not layer.recompute_input_layernorm
    assert layer.gradient_accumulation_fusion
    assert layer.token_dispatcher.seen is seen
    assert not hasattr(layer.token_dispatcher, "more")
    assert log.pop("load_balancing_loss")["values"] is values


def test_a_failed_replay_puts_everything_back_too() -> None:
    layer = Layer()
    with pytest.raises(RuntimeError, match="out of memory"), prepared(layer):
        raise RuntimeError("out of memory")
    assert layer.recompute_mlp


def test_fused_gradients_go_to_a_scratch_buffer_that_is_read_once_per_repeat() -> None:
    live: Any = nn.Parameter(torch.ones(2, 3))
    live.main_grad = torch.full((2, 3), 5.0)
    live.grad_added_to_main_grad = True
    leaf: Any = leaf_of(live, live, fused=True)
    for value in (2.0, 3.0):
        leaf.main_grad += value
        leaf.grad_added_to_main_grad = True
        computed = gradient_of(leaf, torch.empty(2, 3))
        assert computed is not None
        assert computed.eq(value).all()
    assert live.main_grad.eq(5.0).all()
    assert live.grad_added_to_main_grad
    returned = torch.ones(2, 3)
    assert gradient_of(leaf, returned) is returned  # a kernel that is not fused
    assert not hasattr(leaf_of(live, live, fused=False), "main_grad")
