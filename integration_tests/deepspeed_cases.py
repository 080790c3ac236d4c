"""DeepSpeed's layouts as data; importing this does not load DeepSpeed."""

from __future__ import annotations

import importlib
import pathlib
from dataclasses import dataclass, field
from typing import Any

from scout_core.decision.incident import Incident, Kind
from scout_core.lab.faults import FaultAt

PRELOADED = ("integration_tests.deepspeed_server", "integration_tests.deepspeed_jobs")
"""What the fork server of these tests imports."""
CONFIGS = pathlib.Path(__file__).parent.parent / "configs" / "deepspeed"
SCOUT: dict[str, Any] = {
    "interval_steps": 1,
    "on_error": "raise",
    "timing_repeats": 2,
    "exchange_timeout_s": 60,
    "hang": {"enabled": False},
    "communication": {"probe_interval_steps": 0},
}
"""Checks alone, at every step; what goes wrong in SCOUT is raised."""
EVERYTHING = {**SCOUT, "hang": {"enabled": True}, "communication": {"probe_interval_steps": 2}}


@dataclass(frozen=True)
class Layout:
    """One way to parallelise, and who is compared with whom."""

    config: str
    """File in configs/deepspeed."""
    ranks: int
    kind: str = "plain"
    """"plain", "pipeline", "moe", "ulysses" or "ulysses_mesh"."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that do the same work on hidden layers; () for one group of all."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Top-level entries of the configuration to replace."""

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank."""
        return next((g for g in self.groups if rank in g), tuple(range(self.ranks)))


@dataclass(frozen=True)
class Options:
    """What happens in one run."""

    scout: dict[str, Any] | None = None
    """Fields of the block; None trains without a block."""
    steps: int = 4
    until: Kind | None = None
    """End before that, with the first incident of this kind."""
    seed: int = 0
    faults: tuple[FaultAt, ...] = ()
    inside: str = ""
    """Name of the part of a layer that computes wrongly; "" for the layer's own output."""
    width: int = 24
    """Of the model; 24 divides by all numbers of ranks, so that no shard is padded."""
    run_dir: str = ""


@dataclass(frozen=True)
class Result:
    """What one rank saw."""

    losses: list[float]
    parameters: str
    masters: str
    incidents: list[Incident]
    checks: int = 0
    steps: int = 0
    not_covered: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()


LAYOUTS = {
    "zero1": Layout("zero1.json", 4),
    "zero2": Layout("zero2.json", 4),
    "zero3": Layout("zero3.json", 4),
    "hpz": Layout("zero3_hpz.json", 6, groups=((0, 2, 4), (1, 3, 5))),
    "pipeline": Layout("pipeline.json", 8, "pipeline", ((0, 1, 2, 3), (4, 5, 6, 7))),
    "autotp": Layout("autotp.json", 6, groups=((0, 2, 4), (1, 3, 5))),
    "moe": Layout("moe.json", 8, "moe"),
    "ulysses": Layout("ulysses.json", 6, "ulysses", ((0, 2, 4), (1, 3, 5))),
}


_OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
VARIANTS = {
    "zero0": Layout("zero1.json", 3, overrides={"zero_optimization": {"stage": 0}}),
    "zero3 offload": Layout(
        "zero3.json",
        3,
        overrides={"zero_optimization": _OFFLOAD, "zero_force_ds_cpu_optimizer": False},
    ),
    "zero3 autotp": Layout("autotp.json", 6, overrides={"zero_optimization": {"stage": 3}}),
}
"""Further layouts in which training must not change."""


def run(rank: int, body: str, *args: Any) -> Any:
    """Call a function of `integration_tests.deepspeed_jobs`; for `run_ranks`."""
    importlib.import_module("integration_tests.deepspeed_server")  # decides what is compiled
    jobs = importlib.import_module("integration_tests.deepspeed_jobs")
    return getattr(jobs, body)(rank, *args)
