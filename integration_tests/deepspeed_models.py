"""Small models for DeepSpeed's layouts: MoE, Ulysses attention and pipelines of the drill's GPT."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.nn import functional as F

from scout_core.lab.model import GPT, Attention, Block, GPTConfig


class MoEBlock(Block):
    """A block whose perceptron is a mixture of experts."""

    def __init__(self, config: GPTConfig, expert_ranks: int) -> None:
        super().__init__(config)
        del self.up, self.down
        width = config.width
        expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.moe = MoE(width, expert, num_experts=4, ep_size=expert_ranks, k=1, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.drop(self.moe(self.norm2(x))[0])
        return out


class LocalAttention(nn.Module):
    """Attention over whole sequences and some heads: (batch, length, heads, head width)."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous()


class UlyssesAttention(Attention):
    """Attention over a sequence that is split between the ranks of a group."""

    def __init__(self, config: GPTConfig, group: Any) -> None:
        super().__init__(config)
        self.shared = DistributedAttention(LocalAttention(), group, scatter_idx=2, gather_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = [
            project(x).view(batch, length, -1, self.head_width)
            for project in (self.query, self.key, self.value)
        ]
        mixed = self.shared(*parts, 0)
        out: torch.Tensor = self.out(mixed.reshape(batch, length, -1))
        return out


class First(nn.Module):
    """Token and position embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return out


class Last(nn.Module):
    """Final norm and output head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(x))
        return out


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def pipeline(config: GPTConfig, stages: int, replicas: int) -> PipelineModule:
    """The drill's GPT as a pipeline."""
    blocks = [LayerSpec(Block, config) for _ in range(config.layers)]
    return PipelineModule(
        [LayerSpec(First, config), *blocks, LayerSpec(Last, config)],
        topology=PipeDataParallelTopology(num_pp=stages, num_dp=replicas),
        loss_fn=token_loss,
        partition_method="uniform",
    )


def moe_gpt(config: GPTConfig, expert_ranks: int) -> GPT:
    """The drill's GPT with experts in every layer."""
    model = GPT(config)
    model.layers = nn.ModuleList(MoEBlock(config, expert_ranks) for _ in range(config.layers))
    return model


def ulysses_gpt(config: GPTConfig, group: Any) -> GPT:
    """The drill's GPT with sequences split between the ranks of a group."""
    model = GPT(config)
    for layer in model.layers:
        layer.attention = UlyssesAttention(config, group)
    return model
