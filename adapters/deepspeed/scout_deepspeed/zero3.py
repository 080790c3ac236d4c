"""Make ZeRO-3 parameters whole beside DeepSpeed: its status, trace and hooks are left alone.

`ds_tensor` is this rank's shard. `ds_status`, the coordinator's trace and `GatheredParameters` are
not touched, so prefetching and persistence go on as if nothing had happened. Checked with deepspeed
0.19.8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from scout_core.evidence.isolate import Materialised


def is_sharded(parameter: nn.Parameter) -> bool:
    """Tell whether ZeRO-3 shards the parameter."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the whole parameter, whether its memory is here or not."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return tuple(shape)


def is_resident(parameter: Any) -> bool:
    """Tell whether ZeRO-3 keeps the parameter whole between steps (it is a small one)."""
    return bool(parameter.ds_persist) and parameter.ds_status is ZeroParamStatus.AVAILABLE


def gathered(parameters: Sequence[nn.Parameter], device: torch.device) -> Materialised:
    """Gather all shards: one collective per process group and dtype, of the members together.

    Args:
        parameters: of one module, in the same order on all ranks. Resident ones are used as they
            are, because that copy is what training computes with.
        device: where the whole tensors are made; offloaded shards are copied there.
    """
    buckets: dict[tuple[Any, torch.dtype], list[Any]] = defaultdict(list)
    for parameter in parameters:
        if is_sharded(parameter) and not is_resident(parameter):
            shard: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            buckets[parameter.ds_process_group, shard.dtype].append(parameter)  # type: ignore[attr-defined]
    whole: Materialised = {}
    for (group, _), bucket in buckets.items():
        whole |= _gather(bucket, group, device)
    return whole


def _gather(parameters: Sequence[Any], group: Any, device: torch.device) -> Materialised:
    shards = [parameter.ds_tensor.data.view(-1).to(device) for parameter in parameters]
    mine = torch.cat(shards)
    ranks = comm.get_world_size(group)
    everyone = mine.new_empty(ranks * mine.numel())
    comm.all_gather_into_tensor(everyone, mine, group=group)
    rows = everyone.view(ranks, -1)
    whole: Materialised = {}
    start = 0
    for parameter, shard in zip(parameters, shards, strict=True):
        columns = rows[:, start : start + shard.numel()]
        padded = columns.reshape(-1)
        whole[parameter] = padded[: parameter.ds_numel].view(parameter.ds_shape)
        start += shard.numel()
    return whole


def leaf_of(live: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
    """Make a leaf that is an ordinary parameter: nothing of ZeRO-3 recognises it.

    Plain attributes of the user's survive; DeepSpeed's own, and functions bound to the live
    parameter, do not.
    """
    leaf = nn.Parameter(whole.detach(), requires_grad=live.requires_grad)
    kept = {k: v for k, v in vars(live).items() if not k.startswith("ds_") and not callable(v)}
    vars(leaf).update(kept)
    return leaf
