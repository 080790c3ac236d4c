"""Small real training jobs for tests: one body, options as data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from scout_core import enable_resiliency
from scout_core.decision.incident import Incident
from scout_core.lab.model import GPT, GPTConfig, Text, loss_of
from scout_core.lab.parallel import Parallelism, parallelise, plain_parameters


@dataclass(frozen=True)
class JobOptions:
    """What a training script does besides the plain loop."""

    parallelism: str = "ddp"
    ranks: int = 4
    steps: int = 6
    dropout: float = 0.0
    accumulate: int = 1
    clip: float | None = None
    autocast: bool = False
    checkpointed: bool = False
    tied: bool = False
    batch_norm: bool = False
    compiled: str = ""
    """"", "block:BACKEND" (in place), "wrap:BACKEND" (torch.compile of each block) or
    "model:BACKEND"."""
    optimizer: str = "adamw"
    seed: int = 0


@dataclass(frozen=True)
class JobResult:
    """What one rank saw."""

    losses: list[float]
    parameters: list[bytes]
    buffers: list[bytes]
    incidents: list[Incident]
    checks: int
    not_covered: tuple[str, ...]


class Normed(nn.Module):
    """A layer with buffers that its forward updates."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out + self.norm(out.transpose(1, 2)).transpose(1, 2)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


def build(options: JobOptions) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Build and parallelise the model; a collective call."""
    torch.manual_seed(options.seed)
    config = GPTConfig(
        layers=3, width=32, heads=4, context=16, dropout=options.dropout, tied=options.tied
    )
    model = GPT(config)
    for i, layer in enumerate(model.layers):
        if options.batch_norm:
            model.layers[i] = Normed(layer, config.width)
        if options.checkpointed:
            model.layers[i] = checkpoint_wrapper(model.layers[i])
    how, _, backend = options.compiled.partition(":")
    for i, layer in enumerate(model.layers):
        if how == "block":
            layer.compile(backend=backend)
        elif how == "wrap":
            model.layers[i] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
    wrapped, mesh = parallelise(model, Parallelism(options.parallelism), options.ranks)
    if how == "model":
        wrapped.compile(backend=backend)
    return wrapped, OPTIMIZERS[options.optimizer](wrapped.parameters()), mesh


def train(
    rank: int, options: JobOptions, scout: dict[str, Any] | None, run_dir: str = ""
) -> JobResult:
    """Train; with `scout` (its configuration) SCOUT is attached."""
    model, optimizer, mesh = build(options)
    torch.manual_seed(1000 + rank)
    session = None
    if scout is not None:
        session = enable_resiliency(model, optimizer, scout, mesh=mesh, run_dir=run_dir)
    text = Text(16)
    replica = rank // 2 if options.parallelism == "hsdp_tp" else rank
    losses = []
    for step in range(options.steps):
        for part in range(options.accumulate):
            batch = text.batch(options.seed, replica, step * options.accumulate + part, 2)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                loss = loss_of(model, *batch) / options.accumulate
            with _no_sync(model, part + 1 < options.accumulate):
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        if options.clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
    incidents = session.incidents() if session else []
    not_covered = session.coverage().not_covered if session else ()
    checks = session.check_count if session else 0
    if session:
        session.close()
    dist.barrier()
    return JobResult(
        losses,
        [raw(p) for p in plain_parameters(model)],
        [raw(b) for b in model.buffers()],
        incidents,
        checks,
        not_covered,
    )


def _no_sync(model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync() if wanted and hasattr(model, "no_sync") else contextlib.nullcontext()


def raw(tensor: torch.Tensor) -> bytes:
    """Bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """A loss without a target."""
    return F.mse_loss(x, torch.zeros_like(x))
