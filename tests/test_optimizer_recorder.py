"""The recorder of optimizer updates leaves the optimizer's other hooks alone."""

from __future__ import annotations

import torch
from torch import nn

from scout_core.evidence.optimizer_replay import OptimizerRecorder


def test_a_recorder_that_is_followed_by_other_hooks_of_the_optimizer_does_not_disturb_them() -> (
    None
):
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    recorder = OptimizerRecorder(optimizer, round_=0, max_elements=4)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        weight.grad = torch.ones(4)
        optimizer.step()
    recorder.close()
    assert len(calls) == 2
    assert recorder.arguments is not None
