"""Attach SCOUT to a model and an optimizer of Megatron that have just been built."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError
from scout_core.integration import enable
from scout_core.integration.models import Patterns
from scout_core.integration.session import Callback, Session
from scout_megatron.framework import Megatron


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    config: ScoutConfig | Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    fault_callback: Callback | None = None,
) -> Session:
    """Start a session; all ranks call it together, before training starts.

    Args:
        model: this rank's chunks as they are trained, wrapped by Megatron's DDP; or the only one.
        optimizer: what `get_megatron_optimizer` returned.
        config: a `ScoutConfig`, plain values for one, or None for the defaults.
        run_dir: folder for incidents and events; None makes ./scout_runs/<time>.
        fault_callback: called with each new Incident on every rank; its exceptions are logged.

    Raises:
        ScoutError: a bad value, or a job that SCOUT cannot follow. Nothing has been attached then.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    if not isinstance(config, ScoutConfig):
        config = ScoutConfig.parse(dict(config or {}), "the config of scout_megatron.attach")
    framework = framework_of(chunks, optimizer, config)
    return enable.attach(framework, config, run_dir=run_dir, fault_callback=fault_callback)


def framework_of(chunks: Sequence[nn.Module], optimizer: Any, config: ScoutConfig) -> Megatron:
    """Look at a job; local.

    Raises:
        ScoutError: see `attach`.
    """
    refuse(chunks)
    patterns = Patterns(config.layers, config.embedding, config.head)
    return Megatron(chunks, optimizer, patterns, config.exchange_timeout_s)


def refuse(chunks: Sequence[nn.Module]) -> None:
    """Refuse jobs whose parameters cannot be followed.

    Raises:
        ScoutError: no model, or one that is not wrapped by Megatron's own DDP.
    """
    if not chunks:
        raise ScoutError("scout_megatron.attach got no model; pass the list that training uses")
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise ScoutError(
                f"the model is wrapped by {type(chunk).__name__}, and SCOUT follows "
                "megatron.core.distributed.DistributedDataParallel only; leave --scout, or "
                "--use-megatron-fsdp and --use-torch-fsdp2"
            )
