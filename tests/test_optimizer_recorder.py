"""The recorder of optimizer updates leaves the optimizer's other hooks alone."""

from __future__ import annotations

import torch
from torch import nn

from scout_core.evidence.optimizer_replay import OptimizerRecorder, updated


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


class Scaled(torch.optim.SGD):
    """An optimizer that keeps something of its own beside state and hyper-parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.kernel = torch.mul

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.kernel(parameter.data, parameter.grad)


def test_the_replayed_update_has_all_that_the_optimizer_has() -> None:
    optimizer = Scaled([nn.Parameter(torch.ones(2))])
    call = {"parameter": torch.ones(2), "grad": torch.full((2,), 3.0), "state": {}, "hyper": {}}
    (after,) = updated(optimizer, call)
    assert after.tolist() == [3.0, 3.0]
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]
