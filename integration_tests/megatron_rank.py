"""What each rank of a test job does: a loop on megatron-core, watched and sometimes broken."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import check_param_hashes_across_dp_replicas
from scout_megatron import attach
from scout_megatron.optimizers import parts_of
from torch import nn

from integration_tests import megatron_models as models
from integration_tests.megatron_cases import Job, PretrainJob, RankResult
from integration_tests.megatron_results import leave, take_home
from integration_tests.megatron_saves import Saves
from integration_tests.moe_frameworks import experts_of
from scout_core.evidence.capture import Undo
from scout_core.lab.injection import Target, inject
from scout_core.lab.model import Text

MICROBATCHES = 2
BATCH = 2


def run_rank(job: Job | PretrainJob, rank: int) -> None:
    """Run the job's rank to its end and leave its result."""
    torch.set_num_threads(1)
    if isinstance(job, PretrainJob):
        from integration_tests import megatron_pretrain

        megatron_pretrain.run(job, rank)
    else:
        run_loop(job, rank)


def run_loop(job: Job, rank: int) -> None:
    """Train by megatron-core alone."""
    dist.init_process_group("nccl")
    chunks, optimizer, config = models.build(job)
    result = RankResult(version=megatron.core.__version__)
    session = saves = None
    if job.scout is not None:
        session = attach(chunks, optimizer, job.scout, run_dir=f"{job.folder}/scout")
        if job.save_interval:
            saves = Saves(session, pathlib.Path(job.folder, "checkpoints"), chunks)
    data = [batches(job) for _ in chunks]
    ongoing: list[Undo] = []
    for step in range(job.steps):
        if step in job.hangs:  # nobody comes back from one to leave a result
            take_home(chunks, optimizer, session, result)
            leave(result, job.folder)
        while step == job.healed_at and ongoing:
            ongoing.pop()()
        for fault in job.faults:
            if fault.rank == rank and fault.step == step:
                ongoing.append(inject(fault, target(chunks, optimizer, session, job.inside)))
        train_step(job, chunks, optimizer, config, data, step, result)
        if saves is not None and (step + 1) % job.save_interval == 0:
            saves.save(step + 1, result)
    if job.hash_check:
        result.hashes_agree = check_param_hashes_across_dp_replicas(chunks)
    take_home(chunks, optimizer, session, result)
    if saves is not None:
        saves.go_back(result)
    if session is not None:
        session.close()
    leave(result, job.folder)
    dist.barrier()


def train_step(
    job: Job,
    chunks: list[Any],
    optimizer: Any,
    config: Any,
    data: list[Iterator[Any]],
    step: int,
    result: RankResult,
) -> None:
    """One iteration as Megatron's own training loop does it."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if job.layout.chunks else data[0],
        model=chunks if job.layout.chunks else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=models.CONTEXT,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    if job.overflow == step:
        next(chunks[0].parameters()).main_grad.fill_(float("inf"))
    _, norm, _ = optimizer.step()
    result.losses += [float(report["loss"]).hex() for report in reports]
    result.norms.append("" if norm is None else float(norm).hex())


def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
    """Megatron's contract: the output, and a function from output to (loss, report)."""
    batch = next(iterator)
    mask = torch.triu(torch.ones(1, 1, models.CONTEXT, models.CONTEXT, dtype=torch.bool), 1)
    out = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])
    return out, loss_of


def loss_of(per_token: torch.Tensor) -> Any:
    """Mean loss."""
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach()}


def batches(job: Job) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches: one text per data replica, and this rank's part of it."""
    text, replica, number = Text(models.CONTEXT), parallel_state.get_data_parallel_rank(), 0
    mine = models.places_of(job.layout.context, parallel_state.get_context_parallel_rank())
    while True:
        tokens, labels = text.batch(job.seed, replica, number, BATCH)
        positions = torch.arange(models.CONTEXT).expand(BATCH, -1)
        batch = {"tokens": tokens, "labels": labels, "positions": positions}
        yield {name: part[:, mine] for name, part in batch.items()}
        number += 1


def target(chunks: list[Any], optimizer: Any, session: Any, inside: str) -> Target:
    """What faults act on."""
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)]
    parts = [layer.get_submodule(inside) for layer in layers]
    checker = getattr(session, "_checker", None)
    framework = getattr(checker, "_framework", None)
    exchange = getattr(session, "_exchange", None)
    run_dir = None if session is None else session._run_dir.path
    inner = parts_of(optimizer)[0].optimizer
    experts = experts_of(session)
    return Target(parts, inner, framework, exchange, run_dir=run_dir, experts=experts)
