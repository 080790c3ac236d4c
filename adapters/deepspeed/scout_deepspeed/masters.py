"""Pairs of low-precision parameters and their fp32 masters, per optimizer of DeepSpeed.

Attributes of DeepSpeed's optimizers are private; they were checked with deepspeed 0.19.8. Masters
on another device than the parameters (offload) are left out: comparing them would cost a transfer
of the whole optimizer in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scout_core.evidence.coherence import MasterPair

Names = Mapping[torch.nn.Parameter, str]


def master_pairs(optimizer: Any, names: Names) -> tuple[list[MasterPair], list[str]]:
    """Return the pairs this rank can compare, and what it cannot, one sentence each.

    Args:
        optimizer: `engine.optimizer`.
        names: qualified name by parameter.
    """
    pairs = [*_pairs(optimizer, names)]
    local = [pair for pair in pairs if pair.held.device == pair.master.device]
    away = len(pairs) - len(local)
    gap = f"{away} groups of offloaded master weights are not compared with their parameters"
    return local, [gap] if away else []


def owned_masters(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat masters that only this rank holds; none below stage 1, or on NVMe."""
    if getattr(optimizer, "swap_optimizer", False):
        return []
    for name in (
        "fp32_partitioned_groups_flat",  # ZeRO-3
        "single_partition_of_fp32_groups",  # ZeRO-1 and ZeRO-2
        "fp32_groups_flat_partition",  # BF16_Optimizer
    ):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def _pairs(optimizer: Any, names: Names) -> Iterator[MasterPair]:
    if hasattr(optimizer, "fp16_partitioned_groups_flat"):  # ZeRO-3
        yield from _stage_3(optimizer, names)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and ZeRO-2
        masters = optimizer.single_partition_of_fp32_groups
        held = optimizer.parallel_partitioned_bit16_groups
        for i, (parts, master) in enumerate(zip(held, masters, strict=True)):
            mine = parts[dist.get_rank(optimizer.real_dp_process_group[i])]
            yield _flat_pair(mine, master, optimizer.bit16_groups[i], names)
    elif hasattr(optimizer, "bf16_partitioned_groups"):  # BF16_Optimizer
        masters = optimizer.fp32_groups_flat_partition
        for i, master in enumerate(masters):
            place = dist.get_rank(optimizer.real_dp_process_group[i])
            mine = optimizer.bf16_partitioned_groups[i][place]
            yield _flat_pair(mine, master, optimizer.bf16_groups[i], names)
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer, stage 0
        for params, flat, master in zip(
            optimizer.fp16_groups,
            optimizer.fp16_groups_flat,
            optimizer.fp32_groups_flat,
            strict=True,
        ):
            parts = tuple((names[p], p.numel()) for p in params)
            yield MasterPair(flat.data, master.data, parts, 1)
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer, stage 0
        for params, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for p, master in zip(params, masters, strict=True):
                part = ((names[p], p.numel()),)
                yield MasterPair(p.data.view(-1), master.data.view(-1), part, 1)


def _flat_pair(
    held: torch.Tensor, master: torch.Tensor, parameters: Sequence[Any], names: Names
) -> MasterPair:
    """One flat partition; `_hp_mapping` says which piece of which parameter lies where in it."""
    pieces = sorted(
        (p._hp_mapping.hp_fragment_address.start, p._hp_mapping.hp_fragment_address.numel, names[p])
        for p in parameters
        if p._hp_mapping is not None
    )
    parts: list[tuple[str, int]] = []
    end = 0
    for start, size, name in pieces:
        if start > end:
            parts.append(("padding", start - end))
        parts.append((name, size))
        end = start + size
    return MasterPair(held.data, master.data, tuple(parts), 1)


def _stage_3(optimizer: Any, names: Names) -> Iterator[MasterPair]:
    for held, master, parameters in zip(
        optimizer.fp16_partitioned_groups_flat,
        optimizer.fp32_partitioned_groups_flat,
        optimizer.fp16_groups,
        strict=True,
    ):
        if held is None or master is None or held.numel() != master.numel():
            continue  # swapped out to NVMe
        parts = tuple((names[p], p.ds_tensor.numel()) for p in parameters)
        owners = dist.get_world_size(parameters[0].ds_process_group)
        yield MasterPair(held.data, master.data, parts, owners)
