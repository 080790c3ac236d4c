"""`enable_resiliency`: attach SCOUT to a training script with one line."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import GroupExchange
from scout_core.integration.framework import Framework
from scout_core.integration.models import Patterns
from scout_core.integration.pytorch import PyTorch
from scout_core.integration.session import Callback, Session, print_line
from scout_core.report.events import RunDir


def enable_resiliency(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ScoutConfig | Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    fault_callback: Callback | None = None,
) -> Session:
    """Attach SCOUT to a model that is already parallelised; all ranks call it together.

    Args:
        model: as it is trained: wrapped by DDP, or after `fully_shard` and `parallelize_module`.
        optimizer: the one whose `step()` ends an optimizer step.
        config: a `ScoutConfig`, plain values for one, or None for the defaults.
        mesh: DeviceMesh over all ranks with named dimensions; None finds it in the parameters.
        run_dir: folder for incidents and events; None makes ./scout_runs/<time>.
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
    patterns = Patterns(config.layers, config.embedding, config.head)
    framework = PyTorch(model, optimizer, mesh, patterns)
    return attach(framework, config, run_dir=run_dir, fault_callback=fault_callback)


def attach(
    framework: Framework,
    config: ScoutConfig,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    fault_callback: Callback | None = None,
) -> Session:
    """Start a session for any framework; all ranks call it together. Adapters end here."""
    exchange = GroupExchange(framework.device, config.exchange_timeout_s)
    everyone = tuple(range(exchange.world_size))
    default = str(pathlib.Path("scout_runs") / time.strftime("%Y%m%d-%H%M%S"))
    mine = str(run_dir) if run_dir is not None else default
    agreed = exchange.all_gather(mine.encode(), everyone)[0].decode()
    return Session(framework, config, exchange, RunDir(agreed), print_line, fault_callback)
