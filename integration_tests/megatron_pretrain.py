"""What each rank of a pretrain job does: megatron.training's own `pretrain`, watched or broken."""

from __future__ import annotations

import argparse
import pathlib
import runpy
import sys
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import get_args, training
from megatron.training.arguments import parse_args
from scout_megatron import add_scout_args
from scout_megatron.__main__ import main
from scout_megatron.training import _running

from integration_tests.megatron_cases import PretrainJob, RankResult
from integration_tests.megatron_rank import target
from integration_tests.megatron_results import leave, take_home
from scout_core.lab.injection import inject

SCRIPT = pathlib.Path(__file__).parent.parent / "configs" / "megatron" / "pretrain_small.py"
_NORM = 5  # place in what `train_step` returns, megatron.training 0.17 - 0.19

assert parse_args is not None  # imported in the fork server, so that ranks need not


def run(job: PretrainJob, rank: int) -> None:
    """Run the script to its end and leave the result."""
    result = RankResult()
    made: list[Any] = []
    _watch_steps(job, rank, result, made)
    if job.launched:
        main([str(SCRIPT), *job.argv])
    else:
        sys.argv = [str(SCRIPT), *job.argv]
        runpy.run_path(str(SCRIPT))["main"](add_scout_args)
    session = _running[0].session if _running else None
    take_home(made[0], made[1], session, result)
    if session is not None:
        session.close()
    leave(result, job.folder)
    filesystem_async._results_queue = None  # ends the process that Megatron spawned for it
    dist.barrier()


def _watch_steps(job: PretrainJob, rank: int, result: RankResult, made: list[Any]) -> None:
    original = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        model, optimizer = args[2:4]
        iteration = _iteration(get_args())
        if not made:
            made.extend([model, optimizer])
            result.started_at = iteration
        session = _running[0].session if _running else None
        for fault in job.faults:
            if fault.rank == rank and fault.step == iteration:
                inject(fault, target(model, optimizer, session, ""))
        out = original(*args, **kwargs)
        result.losses += [str([float(part).hex() for part in v.view(-1)]) for v in out[0].values()]
        result.norms.append(float(out[_NORM]).hex())
        return out

    training.train_step = train_step


def _iteration(args: argparse.Namespace) -> int:
    return int(args.curr_iteration)
