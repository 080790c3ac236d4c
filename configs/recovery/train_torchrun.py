"""A training script that restarts in place under torchrun, from the checkpoint that SCOUT trusts.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 3 \
        configs/recovery/train_torchrun.py --run-dir runs/demo --steps 60 --corrupt 2:30

(Without that variable torch 2.13 starts gloo again with the addresses of the first launch.)

After a verdict every rank leaves with exit code 75 (torchrun.toml); torchrun starts all of them
again, and `session.restore()` loads the right checkpoint. `--corrupt RANK:STEP` breaks one rank of
the first launch on purpose, to see it happen.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from scout_core import enable_resiliency

RECOVERY = pathlib.Path(__file__).with_name("torchrun.toml")


VOCABULARY, WIDTH, LAYERS = 64, 32, 4


class Block(nn.Module):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Says which token comes next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same in every launch
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def break_rank(model: Model) -> None:
    """Make one layer of this rank compute slightly wrongly from now on, as bad hardware would."""
    block = model.blocks[1]
    right = block.forward
    block.forward = lambda x: right(x) + 1e-3  # type: ignore[method-assign]


def main() -> None:
    """Train, and start again where the evidence allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--corrupt", default="", help="RANK:STEP, in the first launch only")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # find_unused_parameters keeps DDP's buckets, and with them the order of summation: without it
    # a restarted run differs from an undisturbed one in the last bits.
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"interval_steps": 2, "recovery": str(RECOVERY)}
    session = enable_resiliency(model, optimizer, config, run_dir=options.run_dir)
    checkpoint = session.checkpoint(pathlib.Path(options.run_dir) / "checkpoints")
    step = session.restore(start_over=True)
    launch = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    print(f"rank {rank}: launch {launch} goes on from step {step}", flush=True)
    while step < options.steps:
        if launch == 0 and options.corrupt == f"{rank}:{step}":
            break_rank(model.module)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY, (64,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(tokens), (3 * tokens + 1) % VOCABULARY).backward()
        optimizer.step()
        step += 1
        if step % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.async_save(step, state)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"rank {rank}: done at step {step}, sum of parameters {total!r}", flush=True)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
