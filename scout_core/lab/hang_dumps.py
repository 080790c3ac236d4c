"""A stopped model job as Flight Recorder dumps in the form that NCCL jobs leave."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from scout_core.lab.hang_model import Step, Stopped

History = Literal["pending", "ring"]


def nccl_dumps(
    stopped: Stopped, rng: random.Random, *, history: History = "pending", ring: int = 40
) -> dict[int, dict[str, Any]]:
    """Return one dump per rank.

    Args:
        rng: draws the numbers by which a rank knows its groups, which differ between ranks.
        history: "pending" lists what is not complete; "ring" the last `ring` operations.
    """
    names = {name: str(number) for number, name in enumerate(stopped.job.groups)}
    return {
        rank: _Recorder(stopped, rank, names, rng).dump(history, ring)
        for rank in range(stopped.job.world_size)
    }


def pickled(dumps: Mapping[int, dict[str, Any]]) -> dict[int, bytes]:
    """Encode dumps as torch does: protocol 2."""
    return {rank: pickle.dumps(dump, protocol=2) for rank, dump in dumps.items()}


class _Recorder:
    """Counts one rank's operations as NCCL does."""

    def __init__(
        self, stopped: Stopped, rank: int, names: Mapping[str, str], rng: random.Random
    ) -> None:
        self._stopped, self._rank, self._names = stopped, rank, names
        self._own = [name for name, ranks in stopped.job.groups.items() if rank in ranks]
        local_id = 0
        self._local_ids: dict[str, int] = {}
        for name in self._own:
            self._local_ids[name] = local_id
            local_id += rng.randint(1, 3)
        self._collectives: dict[str, int] = defaultdict(int)
        self._pairs: dict[str, int] = defaultdict(int)
        self._status = {
            name: {
                "last_enqueued_collective": -1,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for name in self._own
        }

    def dump(self, history: History, ring: int) -> dict[str, Any]:
        program = self._stopped.programs[self._rank][: self._stopped.entered[self._rank]]
        entries = [self._entry(index, step) for index, step in enumerate(program)]
        if history == "pending":
            entries = [entry for entry in entries if entry["state"] != "completed"]
        return {
            "version": "2.9",
            "pg_config": {
                self._names[name]: {
                    "name": self._names[name],
                    "desc": name,
                    "ranks": str(list(self._stopped.job.groups[name])),
                }
                for name in self._own
            },
            "pg_status": {str(self._local_ids[n]): self._status[n] for n in self._own},
            "entries": entries[-ring:] if history == "ring" else entries,
        }

    def _entry(self, index: int, step: Step) -> dict[str, Any]:
        group, done = step.group, index < self._stopped.completed[self._rank]
        count = self._pairs if step.peer >= 0 else self._collectives
        count[group] += 1
        status = self._status[group]
        status["last_enqueued_collective"] = count[group]
        if done:
            status["last_completed_collective"] = count[group]
        return {
            "record_id": index,
            "pg_id": self._local_ids[group],
            "process_group": (self._names[group], group),
            "collective_seq_id": self._collectives[group],
            "p2p_seq_id": self._pairs[group] if step.peer >= 0 else 0,
            "op_id": self._collectives[group] + self._pairs[group],
            "profiling_name": f"nccl:{self._spelled(step)}",
            "time_created_ns": 1_700_000_000_000_000_000 + index * 1_000_000,
            "input_sizes": [[8]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[8]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if done else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": done,
            "timeout_ms": 180_000,
            "is_p2p": step.peer >= 0,
        }

    def _spelled(self, step: Step) -> str:
        if step.peer < 0:
            return {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}.get(
                step.name, step.name
            )
        ranks = self._stopped.job.groups[step.group]
        arrow = "->" if step.name == "send" else "<-"
        return f"{step.name} {ranks.index(self._rank)}{arrow}{ranks.index(step.peer)}"
