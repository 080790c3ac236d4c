"""Two pipeline stages of the drill's model, on torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from scout_core.lab.model import GPT

STAGES = 2
MICRO_BATCHES = 4


class Stage(nn.Module):
    """One stage's part of a GPT: the first embeds, the last predicts."""

    def __init__(self, whole: GPT, stage: int) -> None:
        """Keep this stage's part; `whole` is the same on all ranks."""
        super().__init__()
        per_stage = len(whole.layers) // STAGES
        end = len(whole.layers) if stage == STAGES - 1 else (stage + 1) * per_stage
        self.is_first, self.is_last = stage == 0, stage == STAGES - 1
        if self.is_first:
            self.tokens, self.positions = whole.tokens, whole.positions
        self.layers = nn.ModuleList(whole.layers[stage * per_stage : end])
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head
        self._schedule: Schedule1F1B | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take token ids (batch, length) or activations, and return activations or logits."""
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.is_last else x

    def connect(self, mesh: DeviceMesh) -> None:
        """Build the schedule over the mesh dimension "pp", once parameters are sharded."""
        pipe = mesh["pp"]
        stage = PipelineStage(
            self,
            pipe.get_local_rank(),
            STAGES,
            torch.device(mesh.device_type),
            group=pipe.get_group(),
        )
        self._schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)

    def train_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Run all forward and backward passes of a step; every rank returns the mean loss."""
        assert self._schedule is not None
        losses: list[torch.Tensor] = []
        if self.is_last:
            self._schedule.step(target=targets, losses=losses)
        else:
            self._schedule.step(inputs)
        return float(torch.stack(losses).mean().detach()) if losses else float("nan")


def _loss(logits: torch.Tensor, targets: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
