"""Addresses of all ranks, read from the process groups that the model was built with.

| work | d | t | p | c | e |
|---|---|---|---|---|---|
| dense | rank in `dp` | in `tp` | in `pp` | in `cp` | 0 |
| expert | rank in `expt_dp` | in `expt_tp` | in `pp` | 0, folded into d | in `ep` |

DDP and the distributed optimizer have whole parameters before every forward pass, so s is 0. Expert
groups are carved out of the data ranks, so e does not constrain dense peers. A virtual pipeline
chunk is part of a layer's name, not of the address. Megatron keeps neither the order in which it
laid the ranks out nor, for a model that was given its groups, a global state; so every rank reads
its own place and one exchange tells it to all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from scout_core.decision.topology import AXES, Coordinate, Topology
from scout_core.errors import ScoutError
from scout_core.evidence.exchange import gather_once


@dataclass(frozen=True)
class Place:
    """What one rank knows of its own place."""

    dense: Coordinate
    expert: Coordinate

    def to_wire(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> Place:
        """Decode."""
        dense, expert = json.loads(data)
        return cls(Coordinate(*dense), Coordinate(*expert))


def place_of(model: Any) -> Place:
    """Read this rank's place. Checked with megatron-core 0.16.1 and 0.18.2.

    Args:
        model: one chunk of this rank without its wrappers, a `MegatronModule`.
    """
    groups = (
        getattr(model, "pg_collection", None) or ProcessGroupCollection.use_mpu_process_groups()
    )
    dense = Coordinate(
        d=_rank(groups, "dp"), t=_rank(groups, "tp"), p=_rank(groups, "pp"), c=_rank(groups, "cp")
    )
    if not model.config.num_moe_experts:
        return Place(dense, dense)
    expert = Coordinate(
        d=_rank(groups, "expt_dp"), t=_rank(groups, "expt_tp"), p=dense.p, e=_rank(groups, "ep")
    )
    return Place(dense, expert)


def gather_places(mine: Place, timeout_s: float) -> list[Place]:
    """Return the places of all ranks, by global rank; a collective over a group of its own."""
    return [Place.from_wire(part) for part in gather_once(mine.to_wire(), timeout_s)]


def topology_of(places: Sequence[Place]) -> Topology:
    """Turn what all ranks know into addresses.

    Raises:
        ScoutError: the places do not fill a grid, so some ranks' work is not what it seems.
    """
    dense, expert = [place.dense for place in places], [place.expert for place in places]
    for name, layout in (("dense", dense), ("expert", expert)):
        degrees = [1 + max(place[axis] for place in layout) for axis in range(len(AXES))]
        if math.prod(degrees) != len(places):
            shown = ", ".join(f"{a}={n}" for a, n in zip(AXES, degrees, strict=True) if n > 1)
            raise ScoutError(
                f"Megatron's process groups give {name} degrees {shown}, that is "
                f"{math.prod(degrees)} ranks, but the job has {len(places)}; SCOUT cannot tell "
                "which ranks do the same work: choose degrees that fill the job, or leave --scout"
            )
    return Topology.from_coordinates(dense, expert)


def _rank(groups: Any, name: str) -> int:
    """Position in a group; 0 in one that the job did not create."""
    group = getattr(groups, name, None)
    return 0 if group is None else dist.get_rank(group)
