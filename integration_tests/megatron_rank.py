"""What each rank of a test job does: a loop on megatron-core, watched and sometimes broken."""

from __future__ import annotations

import hashlib
import pickle
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
from scout_megatron.replaying import auxiliary_losses
from torch import nn

from integration_tests import megatron_models as models
from integration_tests.megatron_cases import Job, PretrainJob, RankResult, result_path
from integration_tests.moe_frameworks import experts_of
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
    session = None
    if job.scout is not None:
        session = attach(chunks, optimizer, job.scout, run_dir=f"{job.folder}/scout")
    data = [batches(job) for _ in chunks]
    for step in range(job.steps):
        for fault in job.faults:
            if fault.rank == rank and fault.step == step:
                inject(fault, target(chunks, optimizer, session, job.inside))
        train_step(job, chunks, optimizer, config, data, step, result)
    if job.hash_check:
        result.hashes_agree = check_param_hashes_across_dp_replicas(chunks)
    take_home(chunks, optimizer, session, result)
    result_path(job.folder, rank).write_bytes(pickle.dumps(result))
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


def take_home(chunks: list[Any], optimizer: Any, session: Any, result: RankResult) -> None:
    """Digest what training ended with, and ask the session what it saw."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    result.parameters = digest([parameter.data for parameter in parameters])
    result.main_grads = digest([parameter.main_grad for parameter in parameters])
    result.masters = digest(
        [
            tensor
            for part in parts_of(optimizer)
            for parameter, state in part.optimizer.state.items()
            for tensor in (parameter.data, *state.values())
            if isinstance(tensor, torch.Tensor)
        ]
    )
    result.log = digest([_values(entry) for _, entry in sorted(auxiliary_losses().items())])
    if session is None:
        return
    coverage = session.coverage()
    result.incidents = session.incidents()
    result.checks, result.steps = session.check_count, session.step_count
    result.skipped = session._checker._framework.skipped_steps
    result.recipes, result.not_covered = coverage.recipes, coverage.not_covered
    result.qualified, result.armed = session.qualified, session.armed
    result.groups = tuple((group.layout, group.ranks) for group in coverage.groups)
    session.close()


def _values(entry: Any) -> torch.Tensor:
    """Summed losses, whatever the version keeps beside them."""
    values: torch.Tensor = entry["values"] if isinstance(entry, dict) else entry.values
    return values


def digest(tensors: list[torch.Tensor]) -> str:
    """Hash of the bytes of all tensors."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
