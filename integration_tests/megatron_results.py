"""What a rank brings home: digests of what training ended with, and what the session saw."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
import torch.distributed as dist
from scout_megatron.optimizers import parts_of
from scout_megatron.replaying import auxiliary_losses

from integration_tests.megatron_cases import RankResult, result_path


def take_home(chunks: list[Any], optimizer: Any, session: Any, result: RankResult) -> None:
    """Digest what training ended with, and ask the session what it saw."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    result.parameters = digest([parameter.data for parameter in parameters])
    result.main_grads = digest([parameter.main_grad for parameter in parameters])
    result.masters = digest(
        [
            tensor
            for part in parts_of(optimizer)
            for parameter, state in part.optimizer.state.items()
            for tensor in (parameter.data, *state.values())
            if isinstance(tensor, torch.Tensor)
        ]
    )
    result.log = digest([_values(entry) for _, entry in sorted(auxiliary_losses().items())])
    if session is None:
        return
    coverage = session.coverage()
    result.incidents = session.incidents()
    result.checks, result.steps = session.check_count, session.step_count
    result.skipped = session._checker._framework.skipped_steps
    result.recipes, result.not_covered = coverage.recipes, coverage.not_covered
    result.qualified, result.armed = session.qualified, session.armed
    result.groups = tuple((group.layout, group.ranks) for group in coverage.groups)


def leave(result: RankResult, folder: str) -> None:
    """Write the result where the test looks for it."""
    result_path(folder, dist.get_rank()).write_bytes(pickle.dumps(result))


def _values(entry: Any) -> torch.Tensor:
    """Summed losses, whatever the version keeps beside them."""
    values: torch.Tensor = entry["values"] if isinstance(entry, dict) else entry.values
    return values


def digest(tensors: list[torch.Tensor]) -> str:
    """Hash of the bytes of all tensors."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
