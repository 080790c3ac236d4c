"""The catalogue of the drill's experts, found on this machine by the profiler of real kernels."""

from __future__ import annotations

import pathlib

import torch

from scout_core.decision.catalog_file import CatalogFile
from scout_core.decision.schedule import GroupedGemm
from scout_core.decision.topology import Topology
from scout_core.evidence.catalog_store import write_catalog
from scout_core.evidence.environment import machine
from scout_core.evidence.kernel_profile import TorchProfiler
from scout_core.integration.expert_facts import environment_of
from scout_core.lab.discovery import Plan, discover
from scout_core.lab.expert_workload import torch_experts
from scout_core.lab.moe import MoEConfig, kernels_of

CATALOGUE = "experts.json"


def shapes_of(config: MoEConfig) -> tuple[tuple[int, ...], ...]:
    """Return the admissible shapes: each padded row count of one expert."""
    return tuple((n,) for n in range(config.alignment, config.most_rows + 1, config.alignment))


def find(width: int, config: MoEConfig, topology: Topology) -> CatalogFile:
    """Observe every admissible shape; on a CPU each then stands for itself."""
    here = machine()
    kernels = kernels_of(1, width, config)
    gemm = GroupedGemm(kernels.in_features, kernels.out_features, num_sms=here["num_sms"])
    workload = torch_experts(gemm, torch.float32, torch.device("cpu"))
    plan = Plan(shapes_of(config), environment_of(kernels, here, topology))
    return discover(plan, TorchProfiler(workload, gemm.num_sms))


def write(folder: str, width: int, config: MoEConfig, topology: Topology) -> pathlib.Path:
    """Find the catalogue and write it to the folder; return its path."""
    path = pathlib.Path(folder) / CATALOGUE
    write_catalog(path, find(width, config, topology))
    return path
