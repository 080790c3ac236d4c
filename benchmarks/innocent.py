"""Slowness that is nobody's fault: how often a healthy rank is accused while a job is disturbed.

Eight gloo processes train with a check after every step, probes and work windows on. One rank at a
time is paused, the machine is loaded by other processes, ranks take turns in collecting garbage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from scout_core.integration.workload import workers_of
from scout_core.lab.drill import Batches, DrillPlan, start, train_step
from scout_core.lab.faults import FaultAt
from scout_core.lab.injection import burn, inject
from scout_core.lab.model import GPTConfig
from scout_core.lab.parallel import Parallelism
from scout_core.testing import run_ranks

RANKS = 8
STEPS = 350  # of each disturbance
BURNERS = 4  # processes beside the job, on a loaded machine
PAUSE_S = 0.2
MODEL = GPTConfig(layers=2, width=96, heads=4, context=32)
LOOKS = {
    "communication": {"probe_interval_steps": 10, "probe_bytes": 4096},
    "workload": {"interval_steps": 24},
}


def _train(rank: int, disturbance: str, steps: int, folder: str) -> dict[str, Any]:
    plan = DrillPlan(Parallelism.HSDP, RANKS, (), 0, 1, model=MODEL, ranks_per_host=4)
    model, optimizer, session, target = start(rank, plan, folder, **LOOKS)
    batches = Batches(plan, workers_of(session.topology)[rank].replica)
    if disturbance == "garbage collection":
        inject(FaultAt("rotating_pauses", 0, 0, delay_s=PAUSE_S / 4), target)
    draw = random.Random(0)
    for step in range(steps):
        paused = draw.randrange(RANKS) if draw.random() < 0.1 else None
        if disturbance == "paused rank" and rank == paused:
            time.sleep(PAUSE_S)
        train_step(model, optimizer, batches.of(step))
    found, checks = session.incidents(), session.check_count
    session.close()
    dist.barrier()
    accused = [i.message for i in found if i.culprits]
    return {"checks": checks, "accused": accused, "said": dict(Counter(i.reason for i in found))}


@contextlib.contextmanager
def _loaded(number: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=burn, args=(3600.0,), daemon=True) for _ in range(number)]
    for each in burners:
        each.start()
    try:
        yield
    finally:
        for each in burners:
            each.kill()
            each.join()


def run(steps: int) -> dict[str, dict[str, Any]]:
    """Measure each disturbance in processes of its own."""
    found = {}
    for disturbance in ("paused rank", "loaded machine", "garbage collection"):
        burners = BURNERS if disturbance == "loaded machine" else 0
        with tempfile.TemporaryDirectory() as folder, _loaded(burners):
            found[disturbance] = run_ranks(
                RANKS, _train, disturbance, steps, folder, timeout_s=1500
            )[0]
    return found


def main() -> None:
    """Print the figures, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    arguments = parser.parse_args(sys.argv[1:])
    found = run(STEPS // 10 if arguments.quick else STEPS)
    if arguments.json:
        print(json.dumps({"innocent": found}))
        return
    print(f"Innocent ranks ({RANKS} processes):")
    for name, seen in found.items():
        said = ", ".join(f"{n} x {reason}" for reason, n in sorted(seen["said"].items()))
        print(f"  {name}: {len(seen['accused'])} accused in {seen['checks']} checks; {said or '-'}")
        for message in seen["accused"]:
            print(f"    {message}")


if __name__ == "__main__":
    main()
