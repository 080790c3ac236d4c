"""What SCOUT costs a training step: idle hooks, one check, one exchange, memory at the peak."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from scout_core import enable_resiliency
from scout_core.evidence.exchange import GroupExchange
from scout_core.lab.drill import train_step
from scout_core.lab.model import GPT, GPTConfig, Text
from scout_core.lab.parallel import Parallelism, parallelise
from scout_core.testing import run_ranks

RANKS = 4
PAIRS = 60
CHECKS = 24
NEVER = 1_000_000_000


class _Job:
    """One training job of this rank, with or without SCOUT."""

    def __init__(self, rank: int, interval_steps: int | None, folder: str) -> None:
        torch.manual_seed(0)
        self.model, mesh = parallelise(GPT(GPTConfig()), Parallelism.DDP, RANKS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session = None
        if interval_steps is not None:
            config = {"interval_steps": interval_steps, "hang": {"enabled": False}}
            self.session = enable_resiliency(
                self.model, self.optimizer, config, mesh=mesh, run_dir=folder
            )
        self._rank = rank
        self._text = Text(64)
        self._step = 0

    def step(self) -> float:
        """Seconds of one step; the batch is made outside of the clock."""
        batch = self._text.batch(0, self._rank, self._step, 4)
        self._step += 1
        dist.barrier()
        begin = time.perf_counter()
        train_step(self.model, self.optimizer, batch)
        return time.perf_counter() - begin

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def _measure(rank: int, folder: str) -> dict[str, Any]:
    off, idle = _Job(rank, None, folder), _Job(rank, NEVER, folder)
    for job in (off, idle):
        [job.step() for _ in range(5)]
    ratios = []
    for pair in range(PAIRS):  # interleaved, in both orders
        first, second = (off, idle) if pair % 2 else (idle, off)
        times = {first: first.step()}
        times[second] = second.step()
        ratios.append(times[idle] / times[off])
    plain = statistics.median(off.step() for _ in range(20))
    before = _peak_bytes()
    checked = _Job(rank, 1, folder)
    [checked.step() for _ in range(6)]
    check = statistics.median(checked.step() for _ in range(CHECKS)) - plain
    extra = _peak_bytes() - before
    exchange = GroupExchange(torch.device("cpu"), 60)
    world = tuple(range(RANKS))
    c3 = _median(lambda: exchange.all_gather(b"x" * 400, world))
    pieces = [torch.zeros(1, dtype=torch.int64) for _ in world]
    raw = _median(lambda: dist.all_gather(pieces, torch.zeros(1, dtype=torch.int64)))
    for job in (off, idle, checked):
        job.close()
    return {
        "idle_ratio": statistics.median(ratios),
        "step_s": plain,
        "check_s": check,
        "exchange_s": c3,
        "all_gather_s": raw,
        "extra_peak_bytes": extra,
    }


def _median(work: Any, times: int = 100) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run() -> dict[str, Any]:
    """Measure on 4 gloo processes; figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = run_ranks(RANKS, _measure, folder, timeout_s=400)[0]
    layers = GPTConfig().layers
    figures["check_steps"] = figures["check_s"] / figures["step_s"]
    figures["check_steps_by_model"] = 7 / layers  # 5 timed repeats of a layer and 2 of another
    return figures


def main() -> None:
    """Print the table."""
    figures = run()
    table = Table("figure", "measured", "aim or model", title=f"Cost on {RANKS} gloo ranks, CPU")
    rows = [
        ("step with idle hooks / step without", f"{figures['idle_ratio']:.4f}", "<= 1.005"),
        (
            "one check, in training steps",
            f"{figures['check_steps']:.2f}",
            f"{figures['check_steps_by_model']:.2f} = V/N",
        ),
        ("one C3 exchange of 400 bytes", f"{figures['exchange_s'] * 1e3:.2f} ms", ""),
        ("one raw all_gather of 8 bytes", f"{figures['all_gather_s'] * 1e3:.2f} ms", ""),
        ("extra memory at the peak", f"{figures['extra_peak_bytes'] / 2**20:.1f} MiB", ""),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
