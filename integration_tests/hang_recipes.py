"""How real jobs stopped, from public bug reports, as small gloo programs.

Every recipe is run by all ranks; `trainer.fault` is the rank that does it. What SCOUT must say is
in the table of test_hangs.py.
"""

from __future__ import annotations

import queue
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from integration_tests.hang_jobs import Trainer, elsewhere

WIDTH = 8


def tower() -> nn.Sequential:
    """A small model, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def batches(trainer: Trainer, count: int) -> Any:
    """A loader that waits for ever for the batch after the last one."""
    source: queue.Queue[torch.Tensor] = queue.Queue()
    for _ in range(count):
        source.put(torch.ones(2, WIDTH))
    while True:
        with trainer.watch.phase("data"):
            batch = source.get()
        yield batch


# A. Desync and mismatch


def drops_a_sample(trainer: Trainer) -> None:
    """1 TorchSpec#126: one micro-batch less, then it waits for data that never comes."""
    for number, _ in enumerate(batches(trainer, 8), start=1):
        if trainer.faulty and number == 4:
            continue
        dist.all_reduce(trainer.x)
        trainer.watch.step(number)


def swallows_an_exception_in_backward(trainer: Trainer) -> None:
    """2 NeMo-Automodel#2468: a caught exception skips backward under DDP."""
    model = nn.parallel.DistributedDataParallel(tower())
    for step in trainer.steps(10):
        loss = model(torch.ones(2, WIDTH)).sum()
        try:
            if trainer.faulty and step == 5:
                raise RuntimeError("out of memory")
            loss.backward()
        except RuntimeError:
            elsewhere()


def optimizer_returns_early(trainer: Trainer) -> None:
    """3 prodigy#35: all_reduce in step() behind a condition that differs between ranks."""
    trainer.warm_up()
    frozen = trainer.faulty
    if not frozen:
        dist.all_reduce(trainer.x)
    elsewhere()


def reduces_where_others_broadcast(trainer: Trainer) -> None:
    """4 accelerate#157: at the end of the epoch one rank reduces, the others broadcast."""
    trainer.warm_up()
    if trainer.faulty:
        dist.all_reduce(torch.ones(6))
    else:
        dist.broadcast(torch.ones(3), src=trainer.fault)
    elsewhere()


def two_ranks_diverge_after_a_checkpoint(trainer: Trainer) -> None:
    """5 accelerate#3250: two ranks, one reduce-scatters where the other gathers."""
    trainer.warm_up()
    if trainer.faulty:
        dist.all_gather_into_tensor(torch.empty(8), trainer.x)
    else:
        dist.reduce_scatter_tensor(torch.empty(2), trainer.x)


def half_gathers_objects(trainer: Trainer) -> None:
    """6 Megatron#4910: half of the ranks enter all_gather_object, half ALLREDUCE."""
    trainer.warm_up()
    if trainer.rank % 2:
        dist.all_gather_object([None] * trainer.size, {"rank": trainer.rank})
    else:
        dist.all_reduce(torch.ones(8))


def reduces_another_size(trainer: Trainer) -> None:
    """7 ms-swift#10183: one rank is late with another size. gloo aborts a process then."""
    trainer.warm_up()
    dist.all_reduce(torch.ones(64 if trainer.faulty else 4096))
    dist.barrier()


def gathers_another_parameter(trainer: Trainer) -> None:
    """10 AgileRL#658: one rank gathers another, larger parameter. gloo aborts a process then."""
    trainer.warm_up()
    numel = 4096 if trainer.faulty else 64
    dist.all_gather_into_tensor(torch.empty(numel * trainer.size), torch.ones(numel))
    dist.barrier()


def hook_fires_only_with_tokens(trainer: Trainer) -> None:
    """8 DeepSpeed#5008: a reduce-scatter in a hook that ranks without tokens never run."""
    trainer.warm_up()
    experts = tower()
    out = torch.empty(WIDTH * WIDTH // trainer.size)
    experts[0].weight.register_hook(
        lambda grad: dist.reduce_scatter_tensor(out, grad.reshape(-1).clone())
    )
    has_tokens = not trainer.faulty
    if has_tokens:
        experts(torch.ones(2, WIDTH)).sum().backward()
    elsewhere()


def skips_a_submodule(trainer: Trainer) -> None:
    """9 transformers#30277: an expert is skipped under ZeRO-3, so gathers differ."""
    trainer.warm_up()
    if not trainer.faulty:  # the expert's parameters
        dist.all_gather_into_tensor(torch.empty(5 * trainer.size), torch.ones(5))
    dist.all_reduce(torch.ones(1))


def leaves_out_a_barrier(trainer: Trainer) -> None:
    """11 DeepSpeed#7044: one rank leaves a collective out at a fixed step."""
    for step in trainer.steps(10):
        if trainer.faulty and step == 5:
            elsewhere()
        dist.all_reduce(trainer.x)
        dist.barrier()


def stage_without_experts(trainer: Trainer) -> None:
    """12 Megatron 0.11: a stage without experts skips the all-reduce of the expert group."""
    expert_group = dist.new_group(list(range(trainer.size)), group_desc="expert")
    trainer.warm_up()
    if trainer.rank // 2 != trainer.fault // 2:
        dist.all_reduce(trainer.x, group=expert_group)
    elsewhere()


def compiles_for_long(trainer: Trainer) -> None:
    """13 nanochat#722: one node compiles while the others wait."""

    def compile() -> None:  # noqa: A001 -- how a stack tells it
        time.sleep(4.5)

    trainer.warm_up()
    if trainer.faulty:
        compile()
    dist.all_reduce(trainer.x)


def has_no_batch_for_the_last_exchange(trainer: Trainer) -> None:
    """14 verl#1158: all-to-all at the epoch boundary, one rank has no batch left."""
    trainer.warm_up()
    if not trainer.faulty:
        dist.all_to_all_single(torch.empty(trainer.size), torch.ones(trainer.size))
    elsewhere()


def has_one_batch_less(trainer: Trainer) -> None:
    """15 pytorch#38174: uneven batch counts; the short rank writes its results meanwhile."""
    for _ in trainer.steps(4 if trainer.faulty else 5):
        dist.all_reduce(trainer.x)
    trainer.watch.boundary("training loop is over")
    elsewhere()


def evaluates_on_one_rank_only(trainer: Trainer) -> None:
    """16 lightning#8821: a reduction on one rank only, while the others train on."""
    trainer.warm_up()
    if trainer.faulty:
        dist.all_reduce(torch.ones(1))
    dist.all_gather_into_tensor(torch.empty(4 * trainer.size), trainer.x)
    dist.barrier()


def saves_on_some_ranks_only(trainer: Trainer) -> None:
    """17 accelerate#3512: only some ranks enter the collective inside the save."""
    trainer.warm_up()
    if trainer.faulty:
        elsewhere()
    with trainer.watch.phase("checkpoint"):
        dist.barrier()


# B. Exceptions, loaders, processes


def swallows_an_exception_and_waits_in_its_loader(trainer: Trainer) -> None:
    """18 lightning#11841: an IndexError is swallowed in augmentation; the loader waits."""
    model = nn.parallel.DistributedDataParallel(tower())
    short = 4 if trainer.faulty else 100
    for number, batch in enumerate(batches(trainer, short), start=1):
        model(batch).sum().backward()
        trainer.watch.step(number)


def pipeline_replica_stays_in_its_loader(trainer: Trainer) -> None:
    """19 BLOOM: PP2 x DP4, the loader of one first-stage rank locks up."""
    half = trainer.size // 2
    first_stage = trainer.rank < half
    stages = [dist.new_group(list(range(half))), dist.new_group(list(range(half, 2 * half)))]
    mine = stages[0] if first_stage else stages[1]
    loader = batches(trainer, 3 if trainer.faulty else 100)
    for _ in trainer.steps(10):
        if first_stage:
            next(loader)
            dist.send(trainer.x, trainer.rank + half)
        else:
            dist.recv(trainer.x, trainer.rank - half)
        dist.all_reduce(trainer.x, group=mine)


def even_ranks_stay_away(trainer: Trainer) -> None:
    """20 lightning#21367: even ranks never reach the loader."""
    trainer.warm_up()
    if trainer.rank % 2 == 0:
        elsewhere()
    dist.barrier()


def raises(trainer: Trainer) -> None:
    """21 torchtitan#3863: NaN on one rank raises there."""
    for step in trainer.steps(100):
        dist.all_reduce(trainer.x)
        if trainer.faulty and step == 5:
            raise ValueError("loss is nan")


def all_wait_on_a_key(trainer: Trainer) -> None:
    """23 marin#7344: all ranks wait on a store key at the same line."""
    trainer.warm_up()
    dist.distributed_c10d._get_default_store().get("never")


# C. Point-to-point and pipelines


def receives_before_sends_in_a_ring(trainer: Trainer) -> None:
    """25 Megatron#5240: every rank receives from the one before it first."""
    trainer.warm_up()
    dist.recv(trainer.x, (trainer.rank - 1) % trainer.size)
    dist.send(trainer.x, (trainer.rank + 1) % trainer.size)


def swaps_tags(trainer: Trainer) -> None:
    """26 pytorch#109401: one pair sends in one order and receives in another."""
    trainer.warm_up()
    a, b = trainer.fault, (trainer.fault + 1) % trainer.size
    order = [7, 9] if trainer.rank == a else [9, 7]
    for tag in order:
        if trainer.rank == a:
            dist.send(trainer.x, b, tag=tag)
        elif trainer.rank == b:
            dist.recv(trainer.x, a, tag=tag)
    dist.barrier()


def sends_on_both_sides(trainer: Trainer) -> None:
    """27 nccl#479: both sides send first."""
    trainer.warm_up()
    other = trainer.rank ^ 1
    dist.send(torch.ones(1 << 20), other)
    dist.recv(torch.empty(1 << 20), other)


# Callers of every kind, and things that must not hide the culprit


def sleeps_before_fully_sharded_forward(trainer: Trainer) -> None:
    """FSDP2: the others gather parameters."""
    from torch.distributed.fsdp import fully_shard

    model = tower()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    for step in trainer.steps(10):
        if trainer.faulty and step == 4:
            elsewhere()
        model(torch.ones(2, WIDTH)).sum().backward()


def sleeps_inside_a_pipeline_stage(trainer: Trainer) -> None:
    """1F1B pipeline: one stage stays in its own forward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class Stage(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if trainer.faulty and self.calls > 5:
                elsewhere()
            return super().forward(x)

    stage = PipelineStage(Stage(WIDTH, WIDTH), trainer.rank, trainer.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda a, b: (a - b).square().mean())
    for _ in trainer.steps(10):
        if trainer.rank == 0:
            schedule.step(torch.randn(4, WIDTH))
        elif trainer.rank == trainer.size - 1:
            schedule.step(target=torch.randn(4, WIDTH), losses=[])
        else:
            schedule.step()


def stays_away_from_an_object_collective(trainer: Trainer) -> None:
    """Object collectives: three collectives each; the others wait in the first."""
    trainer.warm_up()
    for step in trainer.steps(5):
        if trainer.faulty and step == 3:
            elsewhere()
        dist.all_gather_object([None] * trainer.size, trainer.rank)


def does_extra_local_collectives_first(trainer: Trainer) -> None:
    """H6: collectives in a group of its own must not make the culprit look advanced."""
    alone = [dist.new_group([rank]) for rank in range(trainer.size)]
    trainer.warm_up()
    if trainer.faulty:
        for _ in range(50):
            dist.all_reduce(trainer.x, group=alone[trainer.rank])
        elsewhere()
    dist.all_reduce(trainer.x)


def sleeps_in_one_of_two_overlapping_groups(trainer: Trainer) -> None:
    """A 2 x 2 grid: the sleeper's row waits for it, its column waits for the row."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in trainer.steps(10):
        if trainer.faulty and step == 4:
            elsewhere()
        dist.all_reduce(trainer.x, group=rows[trainer.rank // 2])
        dist.all_reduce(trainer.x, group=columns[trainer.rank % 2])


def groups_are_made_in_another_order(trainer: Trainer) -> None:
    """Inconsistent groups: one rank makes the same two groups the other way round."""
    trainer.warm_up()
    members = [[0, 1], list(range(trainer.size))]
    for ranks in reversed(members) if trainer.faulty else members:
        group = dist.new_group(ranks)
    dist.all_reduce(trainer.x, group=group)


# Alive, and slow


def pauses(seconds: float, trainer: Trainer) -> None:
    """One rank works on its own for a while, then all go on."""
    trainer.warm_up()
    if trainer.faulty:
        time.sleep(seconds)
    for _ in trainer.steps(3):
        dist.all_reduce(trainer.x)


def evaluates_for_long(trainer: Trainer) -> None:
    """All ranks evaluate for longer than a step may take."""
    trainer.warm_up()
    with trainer.watch.phase("evaluation"):
        time.sleep(3.5)
    dist.all_reduce(trainer.x)


def saves_for_long_on_one_rank(trainer: Trainer) -> None:
    """One rank saves; the others wait for it in a barrier, in no special phase."""
    trainer.warm_up()
    if trainer.faulty:
        with trainer.watch.phase("checkpoint"):
            time.sleep(3.5)
    dist.barrier()


def is_idle_on_purpose(trainer: Trainer) -> None:
    """The job waits for its next task."""
    trainer.warm_up()
    trainer.watch.pause()
    time.sleep(3.5)
    trainer.watch.resume()
    dist.all_reduce(trainer.x)
