"""What ranks put into collectives tells a culprit from partners that it made wrong with itself."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scout_core import enable_resiliency
from scout_core.evidence.sent import Sent
from scout_core.lab.faults import Magnitude, flip_bit
from scout_core.testing import run_ranks

RANKS = 6  # 3 replicas x 2 tensor-parallel positions
WIDTH = 6


class SumForward(torch.autograd.Function):
    """Adds partial results up; its gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class SumBackward(torch.autograd.Function):
    """Passes unchanged; adds partial gradients up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        if ctx.layer.wrong == "backward":
            flip_bit(total.view(-1)[:1], Magnitude.EXPONENT)
        dist.all_reduce(total, group=ctx.layer.group)
        return total, None


class Layer(nn.Module):
    """A tensor-parallel layer without submodules that communicates inside of its forward."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.group = group
        self.wrong = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial: torch.Tensor = SumBackward.apply(x, self) @ self.weight
        if self.wrong == "forward":
            partial = partial.clone()
            flip_bit(partial.detach().view(-1)[:1], Magnitude.EXPONENT)
        out: torch.Tensor = torch.tanh(SumForward.apply(partial, self.group))
        return out


def train(rank: int, faulty: int, where: str, folder: str) -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank % 2)
    model = nn.Sequential(*(nn.Sequential(Layer(mesh["tp"].get_group())) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {
        "interval_steps": 1,
        "on_error": "raise",
        "kappa": 1e6,
        "timing_repeats": 2,
        "hang": {"enabled": False},
        "communication": {"probe_interval_steps": 0},
    }
    with enable_resiliency(model, optimizer, config, mesh=mesh, run_dir=folder) as session:
        for step in range(3):
            if step == 1 and rank == faulty:
                for layer in model.modules():
                    if isinstance(layer, Layer):
                        layer.wrong = where
            torch.manual_seed(step * 10 + rank // 2)
            model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
            optimizer.step()
            optimizer.zero_grad()
        found = [incident.culprit_ranks for incident in session.incidents()]
    dist.barrier()
    return found


def test_a_wrong_partial_sum_inside_a_forward_names_only_the_rank_that_computed_it(
    tmp_path: object,
) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    print(f"seed {seed}")
    draw = random.Random(seed)
    faulty, where = draw.randrange(RANKS), draw.choice(["forward", "backward"])
    results = run_ranks(RANKS, train, faulty, where, str(tmp_path), timeout_s=50)
    assert {rank for ranks in results[0] for rank in ranks} == {faulty}


def collectives(rank: int) -> list[list[float]]:
    seen: list[list[float]] = []
    mine = torch.full((2,), float(rank + 1))
    with Sent(lambda tensors: seen.append([float(t.sum()) for t in tensors])):
        dist.all_reduce(mine.clone())
        dist.all_gather([torch.empty(2), torch.empty(2)], mine)
        dist.all_to_all_single(torch.empty(2), mine * 3)
        dist.broadcast(mine.clone(), 0)
        x = mine.clone().requires_grad_()
        torch.autograd.grad(SumForward.apply(x * 2, dist.group.WORLD).sum(), x)
    return seen


def test_each_collective_shows_its_input_once_in_order_and_a_broadcast_shows_none() -> None:
    for rank, seen in enumerate(run_ranks(2, collectives)):
        assert seen == [[2.0 * n * (rank + 1)] for n in (1, 1, 3, 2)]
