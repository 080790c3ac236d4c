"""What each rank of a test job does: torchtitan's own `main`, watched and sometimes broken."""

from __future__ import annotations

import pickle
import sys
import types
from dataclasses import replace
from typing import Any

import torch
import torchtitan.train
from torchtitan.config import ConfigManager

from integration_tests.moe_frameworks import experts_of
from integration_tests.torchtitan_job import Break, Job, RankResult, result_path
from scout_core.evidence.folding import signature_of
from scout_core.lab.injection import Target, inject


def train(job: Job, rank: int) -> None:
    """Run the job's rank to its end and leave its result."""
    torch.set_num_threads(1)
    argv = list(job.argv)
    sys.argv = ["train", *argv]
    ConfigManager.parse_args.__defaults__ = (argv,)  # bound when torchtitan was imported
    clock = torchtitan.train.time
    torchtitan.train.time = types.SimpleNamespace(
        perf_counter=clock.perf_counter,
        sleep=lambda seconds: None,  # rank 0 waits 2 s at the end of training
    )
    result = RankResult()
    torchtitan.train.main(_watched(job, rank, result))
    result_path(job.folder, rank).write_bytes(pickle.dumps(result))


def _watched(job: Job, rank: int, result: RankResult) -> type[Any]:
    class Watched(torchtitan.train.Trainer):  # type: ignore[misc]
        def __init__(self, job_config: Any) -> None:
            super().__init__(job_config)
            _record_metrics(self.metrics_processor, result)

        def train_step(self, data_iterator: Any) -> None:
            for each in job.breaks:
                if each.fault.rank == rank and each.fault.step == self.step - 1:
                    break_trainer(self, each)
            super().train_step(data_iterator)

        def close(self) -> None:
            _take_home(self, result)
            super().close()

    return Watched


def _record_metrics(processor: Any, result: RankResult) -> None:
    log, write = processor.log, processor.logger.log

    def logged(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        result.losses.append((step, float(loss).hex(), float(norm).hex()))
        log(step, loss, largest, norm, **more)

    def written(metrics: dict[str, Any], step: int) -> None:
        result.metrics = {key: v for key, v in metrics.items() if key.startswith("scout/")}
        write(metrics, step)

    processor.log, processor.logger.log = logged, written


def break_trainer(trainer: Any, what: Break) -> None:
    """Apply a fault to this rank's trainer from now on."""
    layers = [layer for part in trainer.model_parts for layer in part.layers.values()]
    optimizer = trainer.optimizers.optimizers[0]
    if what.part:
        inside = layers[what.fault.layer].get_submodule(what.part)
        inject(replace(what.fault, layer=0), Target([inside], optimizer))
    else:
        experts = experts_of(getattr(trainer, "scout", None))
        inject(what.fault, Target(layers, optimizer, experts=experts))


def _take_home(trainer: Any, result: RankResult) -> None:
    parameters = {
        f"{part}.{name}": parameter
        for part, model in enumerate(trainer.model_parts)
        for name, parameter in model.named_parameters()
    }
    result.parameters = f"{signature_of(parameters).value:016x}"
    result.loaded = sorted(name for name in sys.modules if name.startswith("scout_"))
    result.hooks = _hook_count(trainer)
    session = getattr(trainer, "scout", None)
    if session is None:
        return
    coverage = session.coverage()
    result.coverage = coverage.line()
    result.recipes = coverage.recipes
    result.not_covered = coverage.not_covered
    result.incidents = session.incidents()
    result.checks = session.check_count
    result.armed = session.armed


def _hook_count(trainer: Any) -> int:
    """Count the hooks that modules and optimizers hold."""
    holders = [module for part in trainer.model_parts for module in part.modules()]
    holders += [trainer.optimizers, *trainer.optimizers]
    return sum(
        len(table)
        for holder in holders
        for name, table in vars(holder).items()
        if "hook" in name and isinstance(table, dict)
    )
