"""Addresses of all ranks, read from DeepSpeed's process groups.

| coordinate | source |
|---|---|
| p | the pipeline grid's stage, or a Megatron-like mpu's pipeline rank |
| t | the grid's slice rank, AutoTP's tensor group, or the mpu's tensor rank |
| c | the sequence-parallel rank, from the mpu or the device mesh |
| d, s | the place among the ranks that ZeRO reduces over and whose t, p, c are equal (see below) |
| e | the rank in the largest expert group; expert replicas are its expert-data group |

Below ZeRO-3 every such rank is a replica (d). In ZeRO-3 the ranks that hold one copy of the
parameters together are told apart by s: all of them, or with hpZ the members of a secondary group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import bwc, groups

from scout_core.decision.topology import Coordinate, Topology
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import gather_once


@dataclass(frozen=True)
class Place:
    """What one rank knows of its own place."""

    t: int
    p: int
    c: int
    data: tuple[int, ...]
    """Global ranks that ZeRO reduces gradients over."""
    shards: tuple[int, ...]
    """Global ranks that hold one copy of the parameters together; alone below stage 3."""
    experts: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Per expert group: rank in it, and the global ranks that hold the same experts."""
    shards_experts: bool = False
    """Expert parameters are sharded over the ranks that hold the same experts."""

    def to_wire(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> Place:
        """Decode."""
        plain = json.loads(data)
        plain["data"], plain["shards"] = tuple(plain["data"]), tuple(plain["shards"])
        plain["experts"] = {name: (e, tuple(q)) for name, (e, q) in plain["experts"].items()}
        return cls(**plain)


def place_of(engine: Any) -> Place:
    """Read this rank's place. Checked with deepspeed 0.19.8.

    Args:
        engine: a `deepspeed.runtime.engine.DeepSpeedEngine` or a subclass, initialised.
    """
    sharded = [p for p in engine.module.parameters() if hasattr(p, "ds_process_group")]
    shards = _ranks(_shard_group(engine, sharded[0])) if sharded else (dist.get_rank(),)
    experts = {
        name: (
            groups._get_expert_parallel_rank(name),
            tuple(groups._get_expert_data_parallel_group_ranks(name)),
        )
        for name in (groups._get_expert_parallel_group_dict() if engine.has_moe_layers else ())
    }
    return Place(
        _tensor_rank(engine),
        _stage(engine),
        groups._get_sequence_parallel_rank(),
        _ranks(engine.seq_data_parallel_group),
        shards,
        experts,
        bool(sharded) and bool(experts),
    )


def gather_places(mine: Place, timeout_s: float) -> list[Place]:
    """Return the places of all ranks, by global rank; a collective over a group of its own."""
    return [Place.from_wire(part) for part in gather_once(mine.to_wire(), timeout_s)]


def topology_of(places: Sequence[Place]) -> Topology:
    """Turn what all ranks know into addresses.

    Raises:
        ScoutError: two ranks would share an address, or expert groups of different sizes are not
            nested in each other.
    """
    dense = [_dense(places, rank) for rank in range(len(places))]
    if not any(place.experts for place in places):
        return Topology.from_coordinates(dense)
    expert = [_expert(places, rank, dense[rank]) for rank in range(len(places))]
    return Topology.from_coordinates(dense, expert)


def _dense(places: Sequence[Place], rank: int) -> Coordinate:
    mine = places[rank]
    alike = [q for q in sorted(mine.data) if _work(places[q]) == _work(mine)]
    copies = sorted({tuple(q for q in alike if q in places[r].shards) for r in alike})
    d = next(i for i, copy in enumerate(copies) if rank in copy)
    return Coordinate(d, copies[d].index(rank), mine.t, mine.p, mine.c)


def _expert(places: Sequence[Place], rank: int, dense: Coordinate) -> Coordinate:
    mine = places[rank]
    if not mine.experts:
        return dense
    names = sorted(mine.experts, key=_expert_group_size)
    e, replicas = mine.experts[names[-1]]
    for name in names[:-1]:
        if not set(replicas) <= set(mine.experts[name][1]):
            raise ScoutError(
                f"rank {rank} shares experts with ranks {list(mine.experts[name][1])} in {name} "
                f"and with {list(replicas)} in {names[-1]}; SCOUT follows only nested expert "
                'groups: use one ep_size, or set "scout": {"enabled": false}'
            )
    alike = [q for q in sorted(replicas) if _work(places[q]) == _work(mine)]
    index = alike.index(rank)
    d, s = (0, index) if mine.shards_experts else (index, 0)
    return Coordinate(d, s, mine.t, mine.p, mine.c, e)


def _work(place: Place) -> tuple[int, int, int]:
    return place.t, place.p, place.c


def _expert_group_size(name: str) -> int:
    return int(name.removeprefix("ep_size_"))


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _shard_group(engine: Any, parameter: torch.nn.Parameter) -> Any:
    secondary = groups._get_zero_param_intra_parallel_group()
    if engine.zero_hpz_partition_size() > 1 and secondary is not None:
        return secondary
    return parameter.ds_process_group  # type: ignore[attr-defined]


def _stage(engine: Any) -> int:
    if hasattr(engine, "grid"):
        return int(engine.grid.get_stage_id())
    if hasattr(engine.mpu, "get_pipeline_model_parallel_rank"):
        return int(engine.mpu.get_pipeline_model_parallel_rank())
    return 0


def _tensor_rank(engine: Any) -> int:
    if hasattr(engine, "grid"):
        return int(engine.grid.get_slice_parallel_rank())
    if groups._TENSOR_MODEL_PARALLEL_GROUP is not None:
        return int(groups.get_tensor_model_parallel_rank())
    # DeepSpeed's own sequence-parallel mpu answers for "model parallel" with its sequence rank.
    if engine.mpu is None or hasattr(engine.mpu, "initialize_sequence_parallel"):
        return 0
    return int(bwc.bwc_tensor_model_parallel_rank(engine.mpu))
