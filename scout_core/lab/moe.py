"""A small mixture of experts in plain PyTorch: router, all-to-all, experts, expert parallelism.

Tokens go to the one expert with the highest score. Experts are split over the ranks of an expert
group; each rank holds some of them whole, sharded by FSDP2 over its expert replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from scout_core.evidence.environment import TORCH_KERNEL, TORCH_SETTINGS, kernel_version
from scout_core.integration.expert_calls import ExpertKernels
from scout_core.lab.model import GPT, Block, GPTConfig


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of the experts."""

    experts: int = 4
    """Of one layer, over all ranks of an expert group."""
    factor: int = 2
    """Width of an expert's hidden layer, in widths of the model."""
    alignment: int = 64
    """Rows of each expert are padded to multiples of this."""
    most_rows: int = 512
    """Largest row count of the drill's catalogue."""


class Experts(nn.Module):
    """The local experts of one rank: what lies between dispatch and combination."""

    def __init__(self, count: int, width: int, config: MoEConfig) -> None:
        super().__init__()
        hidden = config.factor * width
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(count)
        )
        self.scout_kernels = kernels_of(count, width, config)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return (rows, width) for tokens (rows, width), expert by expert by `counts`."""
        parts = torch.split(tokens, counts.tolist())
        return torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=True)])


def kernels_of(count: int, width: int, config: MoEConfig) -> ExpertKernels:
    """Say who computes the local experts."""
    return ExpertKernels(
        library=TORCH_KERNEL,
        version=cast("str", kernel_version(TORCH_KERNEL)),
        settings=TORCH_SETTINGS,
        dtype="float32",
        in_features=width,
        out_features=config.factor * width,
        num_experts=count,
        row_alignment=config.alignment,
    )


class MoE(nn.Module):
    """Routes tokens to experts; all of them are local until `split` divides them."""

    def __init__(self, width: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.experts, bias=False)
        self.experts = Experts(config.experts, width, config)
        self.group: ProcessGroup | None = None

    def split(self, group: ProcessGroup) -> None:
        """Keep this rank's experts only."""
        size = self.config.experts // group.size()
        first = group.rank() * size
        width = self.router.in_features
        self.experts.experts = self.experts.experts[first : first + size]
        self.experts.scout_kernels = kernels_of(size, width, self.config)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., width)."""
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=self.config.experts)
        ranks = 1 if self.group is None else self.group.size()
        came = self._exchange_counts(sent)
        to, come = (n.view(ranks, -1).sum(1).tolist() for n in (sent, came))
        tokens = self._exchange(flat[order], to, come)
        combined = self._exchange(self._compute(tokens, came.view(ranks, -1)), come, to)
        back: torch.Tensor = combined[order.argsort()] * weight[:, None]
        return back.view_as(x)

    def _compute(self, tokens: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """Run the local experts on tokens that lie sender by sender.

        Args:
            came: (senders, local experts) rows.
        """
        index, rows = by_expert(came.tolist(), self.config.alignment)
        padded = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        place = torch.tensor(index, dtype=torch.int64)
        counts = torch.tensor(rows, dtype=torch.int64)
        out = self.experts(padded[place], counts)
        real = (place < len(tokens)).nonzero()[:, 0]
        return cast("torch.Tensor", out[real[place[real].argsort()]])

    def _exchange_counts(self, sent: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return sent
        came = functional.all_to_all_single(sent, None, None, self.group)
        return came + 0  # waits for it

    def _exchange(
        self, tokens: torch.Tensor, to: Sequence[int], come: Sequence[int]
    ) -> torch.Tensor:
        if self.group is None:
            return tokens
        came = functional.all_to_all_single_autograd(tokens, list(come), list(to), self.group)
        return came + 0  # waits for it


def by_expert(came: Sequence[Sequence[int]], alignment: int) -> tuple[list[int], list[int]]:
    """Return the order that puts tokens expert by expert, and the padded rows of each expert.

    Args:
        came: [sender][local expert] rows; tokens lie sender by sender, expert by expert.

    Paddings have the number of rows in all as their place.
    """
    experts, total = len(came[0]), sum(map(sum, came))
    ends = list(itertools.accumulate(n for sender in came for n in sender))
    index: list[int] = []
    rows = []
    for expert in range(experts):
        own = [
            row
            for number, sender in enumerate(came)
            for end in [ends[number * experts + expert]]
            for row in range(end - sender[expert], end)
        ]
        size = -(-len(own) // alignment) * alignment
        index += [*own, *[total] * (size - len(own))]
        rows.append(size)
    return index, rows


class MoEBlock(Block):
    """A block whose perceptron is a mixture of experts."""

    def __init__(self, config: GPTConfig, moe: MoEConfig) -> None:
        super().__init__(config)
        del self.up, self.down
        self.moe = MoE(config.width, moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.drop(self.moe(self.norm2(x)))
        return out


def moe_gpt(config: GPTConfig, moe: MoEConfig) -> GPT:
    """The drill's GPT with experts in every layer."""
    model = GPT(config)
    model.layers = nn.ModuleList(MoEBlock(config, moe) for _ in range(config.layers))
    return model


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Split and shard the experts, and shard the rest over all ranks; a collective call.

    Args:
        mesh: ("dp_shard", "ep") over all ranks.
    """
    everyone = mesh["dp_shard", "ep"]._flatten("dp")
    for layer in model.layers:
        assert isinstance(layer, MoEBlock)
        layer.moe.split(mesh["ep"].get_group())
        experts = fully_shard(layer.moe.experts, mesh=mesh["dp_shard"])
        experts.set_gradient_divide_factor(float(mesh.size()))  # a mean over all ranks' tokens
        experts.set_force_sum_reduction_for_comms(True)  # gloo knows no weighted sums
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
