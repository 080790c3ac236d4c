"""How fast a tensor is signed beside copying it, and beside hashes one might use instead.

    python -m benchmarks.signature [--json] [--device cuda]

All contenders of a size run in turn within each round, so that a busy machine slows all alike; the
figures are medians over the rounds. "missed" counts how many of 400 small changes (pairs of flipped
signs, swapped elements) leave a contender's value as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from scout_core.evidence import scout64
from scout_core.evidence.signature import scout64 as sign_scout64
from scout_core.evidence.signature import signature, signatures

SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "64 MB": 1 << 26, "512 MB": 1 << 29}
ROUNDS = {"64 KB": 200, "1 MB": 100, "64 MB": 9, "512 MB": 5}
COPY = "copy_"
Hash = Callable[[Tensor], object]


def run(device: str = "cpu") -> dict[str, Any]:
    """Measure all sizes on one device; returns GB/s, ratios to `copy_` and missed changes."""
    contenders = _contenders(device)
    throughput = {size: _gigabytes_per_s(contenders, size, device) for size in SIZES}
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "gb_per_s": throughput,
        "of_copy": {
            size: {name: value / row[COPY] for name, value in row.items()}
            for size, row in throughput.items()
        },
        "missed_of_400": {
            name: _missed(value, device)
            for name, value in contenders.items()
            if name not in (COPY, "clone")
        },
        "one_element_us": _median_s(lambda: signature(torch.ones(1, device=device)), 200) * 1e6,
        "each_of_100_us": _median_s(_sign_100_small(device), 50) * 1e4,
    }


def _contenders(device: str) -> dict[str, Hash]:
    """Name -> value of a tensor that can be compared; every one waits for its result."""
    found: dict[str, Hash] = {
        COPY: _copy_into({}),
        "clone": Tensor.clone,
        "signature": signature,
        "odd-multiplier sum": _odd_multiplier_sum,
    }
    if hasattr(torch, "hash_tensor"):
        found["torch.hash_tensor"] = _hash_tensor
    if device == "cpu":
        found["scout64 on CPU"] = sign_scout64
        found["blake2b"] = lambda tensor: hashlib.blake2b(_memory(tensor), digest_size=8).digest()
        found["crc32"] = lambda tensor: zlib.crc32(_memory(tensor))
    return found


def _copy_into(targets: dict[int, Tensor]) -> Hash:
    def copy(tensor: Tensor) -> Tensor:
        target = targets.get(tensor.nbytes)
        if target is None:
            targets.clear()
            target = targets.setdefault(tensor.nbytes, torch.empty_like(tensor))
        return target.copy_(tensor)

    return copy


def _hash_tensor(tensor: Tensor) -> int:
    return int(torch.hash_tensor(tensor).view(torch.int64))


def _memory(tensor: Tensor) -> memoryview:
    return tensor.numpy().data


def _odd_multiplier_sum(tensor: Tensor) -> int:
    """The obvious position-sensitive hash: words times odd constants, summed modulo 2^64."""
    multipliers, _, _ = scout64.multipliers(tensor.device)
    words = tensor.view(torch.int64)
    columns = min(words.numel(), scout64.ROW_WORDS)
    rows = words.view(-1, columns)
    weights = torch.arange(1, 2 * len(rows), 2, device=tensor.device)
    return int(((rows * multipliers[:columns]).sum(1) * weights).sum())


def _gigabytes_per_s(contenders: dict[str, Hash], size: str, device: str) -> dict[str, float]:
    tensor = torch.randn(SIZES[size] // 4, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(ROUNDS[size] + 1):
        for name, value in contenders.items():
            elapsed_s = _timed(value, tensor)
            if turn:  # the first one allocates and compiles
                seconds[name].append(elapsed_s)
    return {name: SIZES[size] / statistics.median(taken) / 1e9 for name, taken in seconds.items()}


def _timed(value: Hash, tensor: Tensor) -> float:
    start = time.perf_counter()
    value(tensor)
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter() - start


def _median_s(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _sign_100_small(device: str) -> Callable[[], object]:
    tensors = [torch.randn(64, device=device) for _ in range(100)]
    return lambda: signatures(tensors)


def _missed(value: Hash, device: str) -> int:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(64, generator=generator).to(device)
    pairs = list(itertools.combinations(range(1, 64, 2), 2))[:200]  # odd: the upper half of a word
    missed = 0
    for pair in pairs:
        i, j = pair
        negated, swapped = tensor.clone(), tensor.clone()
        negated[[i, j]] *= -1
        swapped[[i, j]] = tensor[[j, i]]
        missed += sum(value(changed) == value(tensor) for changed in (negated, swapped))
    return missed


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print the figures as one table."""
    table = Table(title=f"GB/s on {result['device']}, {result['threads']} thread(s), and of copy_")
    for heading in ("", *SIZES, "missed of 400"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in result["gb_per_s"]["1 MB"]:
        cells = [
            f"{result['gb_per_s'][size][name]:.2f} ({result['of_copy'][size][name]:.0%})"
            for size in SIZES
        ]
        table.add_row(name, *cells, str(result["missed_of_400"].get(name, "-")))
    console.print(table)
    console.print(
        f"one element: {result['one_element_us']:.1f} us; "
        f"100 small tensors at once: {result['each_of_100_us']:.1f} us each"
    )


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    result = run(arguments.device)
    if arguments.json:
        print(json.dumps({"schema": "scout.benchmark.signature/1", **result}))
    else:
        print_report(result, Console(highlight=False))


if __name__ == "__main__":
    main()
