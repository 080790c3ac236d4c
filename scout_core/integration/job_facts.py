"""What the ranks of a job tell each other once, at the start."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scout_core.decision import rotation
from scout_core.decision.rotation import OPTIMIZER, Rotation
from scout_core.decision.topology import Topology
from scout_core.evidence.exchange import Exchange
from scout_core.integration.framework import Framework


@dataclass(frozen=True)
class JobFacts:
    """Equal on all ranks."""

    topology: Topology
    """Addresses, with host names."""
    devices: dict[int, str]
    """Device name by global rank."""
    rotation: Rotation
    """The path classes of all ranks."""
    not_covered: tuple[str, ...]
    """What cannot be replayed and why, one sentence each."""


def learn(framework: Framework, exchange: Exchange, gaps: Sequence[str]) -> JobFacts:
    """Gather what each rank can replay, its host and its device; collective.

    Args:
        gaps: what this rank cannot cover, besides what the framework names.
    """
    mine = {
        "host": socket.gethostname(),
        "device": device_name(framework.device),
        "recipes": _local_recipes(framework),
        "gaps": [*framework.uncovered(), *_optimizer_gaps(framework), *gaps],
    }
    everyone = tuple(range(exchange.world_size))
    gathered = exchange.all_gather(json.dumps(mine).encode(), everyone)
    told: list[dict[str, Any]] = [json.loads(part) for part in gathered]
    topology = framework.topology()
    if not any(topology.hosts):
        topology = replace(topology, hosts=tuple(each["host"] for each in told))
    return JobFacts(
        topology,
        {rank: each["device"] for rank, each in enumerate(told)},
        rotation.merge([each["recipes"] for each in told]),
        tuple(dict.fromkeys(gap for each in told for gap in each["gaps"])),
    )


def replayable(framework: Framework) -> list[torch.optim.Optimizer]:
    """Optimizers whose update of a slice is the slice of their update."""
    return [each for each in framework.optimizers() if framework.is_elementwise(each)]


def device_name(device: torch.device) -> str:
    """Name a device for reports."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def _local_recipes(framework: Framework) -> list[str]:
    names = list(dict.fromkeys(site.path_class for site in framework.sites()))
    return [*names, OPTIMIZER] if replayable(framework) else names


def _optimizer_gaps(framework: Framework) -> list[str]:
    return [
        f"updates of {type(optimizer).__name__} cannot be replayed on a slice"
        for optimizer in framework.optimizers()
        if not framework.is_elementwise(optimizer)
    ]
