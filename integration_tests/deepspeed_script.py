"""A user's training script for DeepSpeed: it knows nothing of SCOUT.

torchrun ... deepspeed_script.py CONFIG.json LOSSES.json
"""

from __future__ import annotations

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import initialize
from torch import nn

# Training over gloo needs no shared-memory kernels: do not compile them.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = nn.functional.cross_entropy(self.head(x).float(), tokens)
        return loss


def main(config: str, losses: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    seen = []
    for step in range(6):
        torch.manual_seed(step * 100 + dist.get_rank())
        loss = engine(torch.randint(0, 32, (8,)))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    if dist.get_rank() == 0:
        with open(losses, "w") as file:
            json.dump(seen, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
