"""`enable_resiliency`: attach SCOUT to a training script with one line."""

from __future__ import annotations

import itertools
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store  # torch 2.10 - 2.13

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import Exchange, GroupExchange
from scout_core.integration.framework import Framework
from scout_core.integration.hang_watch import HangWatch
from scout_core.integration.job_facts import device_name
from scout_core.integration.models import Patterns
from scout_core.integration.pytorch import PyTorch
from scout_core.integration.session import Callback, Session
from scout_core.report.events import RunDir, print_line

_starts = itertools.count()  # keys of the job's store are used once


def enable_resiliency(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ScoutConfig | Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    dataloader: Iterable[Any] | None = None,
    fault_callback: Callback | None = None,
) -> Session:
    """Attach SCOUT to a model that is already parallelised; all ranks call it together.

    Args:
        model: as it is trained: wrapped by DDP, or after `fully_shard` and `parallelize_module`.
        optimizer: the one whose `step()` ends an optimizer step.
        config: a `ScoutConfig`, plain values for one, or None for the defaults.
        mesh: DeviceMesh over all ranks with named dimensions; None finds it in the parameters.
        run_dir: folder for incidents and events; None makes ./scout_runs/<time>.
        dataloader: of the training loop, so that a stall of the input is told from others.
        fault_callback: called with each new Incident on every rank; its exceptions are logged.

    Returns:
        The session; `close()` it, or use it as a context manager, or let the process end.

    Raises:
        ScoutError: no process group, a bad configuration, mesh, pattern or run_dir. Nothing has
            been attached then.
    """
    if not dist.is_initialized():
        raise ScoutError(
            "enable_resiliency needs torch.distributed; call init_process_group before it"
        )
    if not isinstance(config, ScoutConfig):
        config = ScoutConfig.parse(dict(config or {}), "the config of enable_resiliency")
    modules = config.experts.modules
    patterns = Patterns(config.layers, config.embedding, config.head, experts=modules)
    framework = PyTorch(model, optimizer, mesh, patterns)
    return attach(
        framework, config, run_dir=run_dir, dataloader=dataloader, fault_callback=fault_callback
    )


def attach(
    framework: Framework,
    config: ScoutConfig,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    dataloader: Iterable[Any] | None = None,
    fault_callback: Callback | None = None,
    exchange: Exchange | None = None,
) -> Session:
    """Start a session for any framework; all ranks call it together. Adapters end here.

    Args:
        exchange: of all ranks of the job; None makes one on process groups of its own.
    """
    exchange = exchange or GroupExchange(framework.device, config.exchange_timeout_s)
    everyone = tuple(range(exchange.world_size))
    default = str(pathlib.Path("scout_runs") / time.strftime("%Y%m%d-%H%M%S"))
    mine = str(run_dir) if run_dir is not None else default
    folder = RunDir(exchange.all_gather(mine.encode(), everyone)[0].decode())
    session = Session(framework, config, exchange, folder, print_line, fault_callback)
    if config.hang.enabled and not HangWatch.is_running():
        session.hang = _watch_hangs(session, framework, config, folder)
        if dataloader is not None:
            session.hang.watch_loader(dataloader)
    return session


def _watch_hangs(
    session: Session, framework: Framework, config: ScoutConfig, run_dir: RunDir
) -> HangWatch:
    """Start the out-of-band observer; one per process, whatever the number of sessions."""
    watch = HangWatch.start(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        run_dir=run_dir,
        config=config.hang,
        store=PrefixStore(f"scout/{next(_starts)}", _get_default_store()),
        topology=session.topology,
        job=config.job,
        device=device_name(framework.device),
    )
    watch.watch_layers({s.name: s.module for s in framework.sites() if s.role == "hidden"})
    for optimizer in framework.optimizers():
        watch.watch_optimizer(optimizer)
    return watch
