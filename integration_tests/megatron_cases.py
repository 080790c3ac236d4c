"""Megatron's layouts and jobs as data; importing this does not load Megatron."""

from __future__ import annotations

import pathlib
import pickle
from dataclasses import dataclass, field
from typing import Any

from scout_core.decision.incident import Incident
from scout_core.lab.faults import FaultAt

SCOUT = {"interval_steps": 1, "on_error": "raise", "timing_repeats": 2, "exchange_timeout_s": 60}
QUIET = {**SCOUT, "kappa": 1e6}  # replays of a millisecond on shared cores: time is not judged


@dataclass(frozen=True)
class Layout:
    """One way to parallelise a small GPT, and who is compared with whom."""

    ranks: int
    groups: tuple[tuple[int, ...], ...]
    """Ranks that do the same dense work."""
    expert_groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that do the same expert work; () without experts."""
    tensor: int = 1
    pipeline: int = 1
    chunks: int | None = None
    """Virtual pipeline chunks per stage."""
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = False
    half: str = ""
    """"bf16", "fp16", or "" for float32 throughout."""
    distributed_optimizer: bool = False
    instances: int = 1
    overlap: bool = False
    layers: int = 2
    experts: int = 0
    dropout: float = 0.1
    config: dict[str, Any] = field(default_factory=dict)
    """More fields of Megatron's TransformerConfig."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """More fields of Megatron's OptimizerConfig."""

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the dense group of a rank."""
        return next(group for group in self.groups if rank in group)

    def expert_peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the expert group of a rank."""
        return next(group for group in self.expert_groups if rank in group)

    @property
    def layers_of_rank(self) -> int:
        """Layers that one rank holds."""
        return self.layers // self.pipeline


@dataclass(frozen=True)
class Job:
    """One job for the fork server."""

    layout: Layout
    folder: str
    """Logs and results of the ranks go here."""
    scout: dict[str, Any] | None = None
    """Fields of the configuration; None trains without SCOUT."""
    steps: int = 4
    seed: int = 0
    faults: tuple[FaultAt, ...] = ()
    healed_at: int | None = None
    """Step at whose start the faults that began before are taken away."""
    save_interval: int = 0
    """Steps between checkpoints; 0 saves none."""
    inside: str = ""
    """Name of the part of a layer that is at fault; "" for the layer itself."""
    width: int = 32
    timeout_s: float = 150.0
    stop_when: str = ""
    """The job is ended when this file holds something: a job that hangs does not end by itself."""
    hash_check: bool = False
    """Let Megatron's own check of parameter hashes look at the end."""
    overflow: int | None = None
    """Step in which a gradient becomes infinite on all ranks, so that the update is skipped."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.layout.ranks

    @property
    def hangs(self) -> set[int]:
        """Steps that never end."""
        return {fault.step for fault in self.faults if fault.kind == "hang"}


@dataclass(frozen=True)
class PretrainJob:
    """A job of megatron.training's own `pretrain`."""

    ranks: int
    argv: tuple[str, ...]
    """Of the script configs/megatron/pretrain_small.py."""
    folder: str
    launched: bool = True
    """By `python -m scout_megatron`; otherwise the script passes `add_scout_args` on."""
    faults: tuple[FaultAt, ...] = ()
    timeout_s: float = 150.0
    stop_when: str = ""


@dataclass
class RankResult:
    """What one rank brings home."""

    losses: list[str] = field(default_factory=list)
    """Hex: compared bit for bit; empty on ranks that compute no loss."""
    norms: list[str] = field(default_factory=list)
    """Gradient norms in hex."""
    parameters: str = ""
    masters: str = ""
    """Digest of what the torch optimizers hold."""
    main_grads: str = ""
    """Digest of the accumulated gradients of the last step."""
    log: str = ""
    """Digest of Megatron's own log of auxiliary losses."""
    incidents: list[Incident] = field(default_factory=list)
    checks: int = 0
    steps: int = 0
    skipped: int = 0
    recipes: tuple[str, ...] = ()
    qualified: frozenset[str] = frozenset()
    not_covered: tuple[str, ...] = ()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(layout, ranks) of every peer group."""
    armed: bool = True
    version: str = ""
    hashes_agree: bool = True
    """What Megatron's own check says of this rank."""
    started_at: int = 0
    """Iteration that training began at."""
    saved: dict[int, str] = field(default_factory=dict)
    """The gate's label of a save when it was begun, by step; some of them were not taken."""
    went_back_to: int = 0
    """Step of the checkpoint that the gate chose after a corruption."""
    is_restored: bool = False
    """Whether loading that one gave the weights that were saved."""


def result_path(folder: str, rank: int) -> pathlib.Path:
    """Where a rank leaves its result."""
    return pathlib.Path(folder) / f"rank-{rank}.pickle"


def read_result(folder: str, rank: int) -> RankResult:
    """Return what a rank left."""
    result = pickle.loads(result_path(folder, rank).read_bytes())
    assert isinstance(result, RankResult)
    return result


def _strided(ranks: int, stride: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, ranks, stride)) for first in range(stride))


LAYOUTS = {
    "dp4": Layout(4, ((0, 1, 2, 3),)),
    "dp4_tp2": Layout(8, _strided(8, 2), tensor=2),
    "dp4_pp2": Layout(8, ((0, 1, 2, 3), (4, 5, 6, 7)), pipeline=2, layers=4),
    "dp3_vpp2": Layout(6, ((0, 1, 2), (3, 4, 5)), pipeline=2, chunks=2, layers=4),
    "dp4_tp2_sp": Layout(
        8, _strided(8, 2), tensor=2, sequence_parallel=True, distributed_optimizer=True
    ),
    "dp3_cp2": Layout(6, _strided(6, 2), context=2),
    "dist_opt": Layout(4, ((0, 1, 2, 3),), distributed_optimizer=True),
    "overlap": Layout(
        4, ((0, 1, 2, 3),), distributed_optimizer=True, overlap=True, half="bf16", layers=3
    ),
    "instances": Layout(4, ((0, 1, 2, 3),), distributed_optimizer=True, instances=2, half="bf16"),
    "bf16": Layout(4, ((0, 1, 2, 3),), half="bf16"),
    "moe_ep2": Layout(
        8, (tuple(range(8)),), _strided(8, 2), expert=2, experts=4, distributed_optimizer=True
    ),
    "moe_ep2_tp2": Layout(
        8,
        _strided(8, 2),
        _strided(8, 2),
        tensor=2,
        expert=2,
        expert_tensor=1,
        experts=4,
        sequence_parallel=True,
    ),
}

_SELECTIVE = {"recompute_granularity": "selective"}
MODES = {
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "recompute attention, fused weight gradients": {
        **_SELECTIVE,
        "recompute_modules": ["core_attn"],
        "gradient_accumulation_fusion": True,
    },
    "recompute mlp": {
        **_SELECTIVE,
        "recompute_modules": ["mlp"],
        "add_bias_linear": False,  # 0.16.1 recurses for ever with a bias
    },
}
"""Fields of TransformerConfig that change how a layer runs, not what it computes."""
MOE_MODES = {
    "recompute experts and shared experts, balance by bias": {
        **_SELECTIVE,
        "recompute_modules": ["moe", "shared_experts"],
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    },
}
"""The same for layers with experts."""
