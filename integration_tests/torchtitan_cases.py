"""Layouts of torchtitan jobs as data: configuration, processes, and who can be named."""

from __future__ import annotations

import pathlib
import random
from dataclasses import dataclass

from integration_tests.torchtitan_job import Break
from scout_core.lab.faults import FaultAt, Magnitude, Surface

CONFIGS = pathlib.Path("configs") / "torchtitan"  # relative to the repository root
SMALL = (
    "--experimental.custom_import=integration_tests.torchtitan_flavors",
    "--model.flavor=tiny",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--metrics.disable_color_printing",
)
"""What makes a configuration for accelerators small enough for two cores."""

FIRST_WRONG_STEP = 10
"""A corruption starts when one checkpoint has been proven by two clean cycles."""
FLOAT32 = "--training.mixed_precision_param=float32"
"""In bfloat16 the residual stream rounds small corruptions of a submodule away."""
DENSE_PARTS = ("", "attention", "attention.wq", "attention.wo", "feed_forward.w1", "feed_forward")
MOE_PARTS = ("", "attention", "attention.wkv_b", "attention.wo")


@dataclass(frozen=True)
class Layout:
    """One way to parallelise, and what is expected of it."""

    name: str
    config: str
    ranks: int
    groups: str
    """How the coverage line begins."""
    layers: int
    """Layers on each rank."""
    overrides: tuple[str, ...] = ()
    parts: tuple[str, ...] = DENSE_PARTS
    """Submodules of a layer in which a fault is injected; "" is the layer itself."""
    latency_steps: int = 4
    """Checks after which each layer on a rank has been replayed once more."""
    proves: bool = False
    """All state has replicas enough, so that checkpoints are verified and not just uncertified."""

    @property
    def steps(self) -> int:
        """Two clean cycles of four checks, one step, and as many as a corruption needs to show."""
        return FIRST_WRONG_STEP + self.latency_steps

    def arguments(self, *more: str) -> tuple[str, ...]:
        """Command line of torchtitan."""
        file = f"--job.config_file={CONFIGS / self.config}"
        return (file, *SMALL, f"--training.steps={self.steps}", *self.overrides, *more)


LAYOUTS = (
    Layout("fsdp4", "fsdp.toml", 4, "1 peer group(s) of 4 can attribute", 4),
    Layout("hsdp2x2", "hsdp.toml", 4, "1 peer group(s) of 4 can attribute", 4),
    Layout(
        "hsdp4x2",
        "hsdp.toml",
        8,
        "2 peer group(s) of 4 can attribute",
        4,
        ("--parallelism.data_parallel_replicate_degree=4",),
        proves=True,
    ),
    Layout("hsdp2x2_tp2", "hsdp_tp.toml", 8, "2 peer group(s) of 4 can attribute", 4),
    Layout("pp2_fsdp3", "pp.toml", 6, "2 peer group(s) of 3 can attribute", 2),
    Layout("cp2_fsdp3", "cp.toml", 6, "2 peer group(s) of 3 can attribute", 4),
    Layout(
        "moe_fsdp4_ep2",
        "moe.toml",
        4,
        "3 peer group(s) of 2/4 can attribute/detect",
        3,
        parts=MOE_PARTS,
        latency_steps=8,
    ),
)


def draw_sdc(layout: Layout, seed: int, step: int) -> Break:
    """Draw rank, layer, part of it, surface and bit of a persistent corruption."""
    rng = random.Random(seed)
    fault = FaultAt(
        "sdc",
        rank=rng.randrange(layout.ranks),
        step=step,
        layer=rng.randrange(layout.layers),
        surface=rng.choice([Surface.OUTPUT, Surface.GRADIENT]),
        magnitude=rng.choice([Magnitude.MID_BIT, Magnitude.SIGN]),
        seed=rng.randrange(1 << 30),
    )
    return Break(fault, rng.choice(layout.parts))


def draw_straggler(layout: Layout, seed: int, step: int = 2) -> Break:
    """Draw the rank whose layers all take longer from a step on."""
    rng = random.Random(~seed)
    return Break(FaultAt("straggler", rng.randrange(layout.ranks), step, percent=250.0))


def draw_hang(layout: Layout, seed: int, step: int = 2) -> Break:
    """Draw the rank and the layer in which it stands still."""
    rng = random.Random(seed)
    rank, layer = rng.randrange(layout.ranks), rng.randrange(layout.layers)
    return Break(FaultAt("hang", rank, step, layer=layer))
