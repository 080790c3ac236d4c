"""The drill's model and data: a byte-level GPT trained on the standard library's source files."""

from __future__ import annotations

import pathlib
import sysconfig
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults give about 1 M parameters."""

    layers: int = 4
    width: int = 136
    heads: int = 4
    context: int = 64
    dropout: float = 0.0
    tied: bool = False
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal self-attention; the number of local heads follows the projection's local width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return joined


class Block(nn.Module):
    """Attention and a two-layer perceptron with residuals."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """A small language model over bytes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, length, vocabulary) for token ids (batch, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Text:
    """Random windows of text that is on every machine, by seed, rank and step."""

    def __init__(self, context: int, max_bytes: int = 1 << 20) -> None:
        self._context = context
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:80])
        self._bytes = torch.frombuffer(bytearray(text[:max_bytes]), dtype=torch.uint8)

    def batch(
        self, seed: int, rank: int, step: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, each (size, context) token ids."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank * 10_007 + step)
        last = len(self._bytes) - self._context - 1
        starts = torch.randint(last, (size,), generator=generator).tolist()
        rows = [self._bytes[start : start + self._context + 1].long() for start in starts]
        windows = torch.stack(rows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
