"""What only a CUDA device can show, in one script of a few minutes.

Run it on one GPU: `python -m benchmarks gpu_check`. Each part says what it found; a part that
cannot run says why it was skipped. Exit code 1 when a part failed, 0 otherwise, also without a GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scout_core.evidence.capture import Capture, Modes, Recorder, take_apart
from scout_core.evidence.clock import clock_for
from scout_core.evidence.isolate import plain_leaf
from scout_core.evidence.optimizer_replay import OptimizerRecorder, updated
from scout_core.evidence.replay import Device, Inputs, Replayed, replay
from scout_core.evidence.rng import get_rng, set_rng
from scout_core.evidence.row_log import RowLog
from scout_core.evidence.signature import algorithm_of, scout64, signature, signatures
from scout_core.lab.model import Block, GPTConfig

DEADLINE_S = 420.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


class Skipped(Exception):
    """A part that cannot run here, with the reason."""


class Outcome(NamedTuple):
    """What one part came to."""

    part: str
    state: str  # "ok", "FAILED" or "skipped"
    text: str


def cuda() -> torch.device:
    """Return the device.

    Raises:
        Skipped: there is none.
    """
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device on this machine")
    return torch.device("cuda", 0)


def signatures_equal_the_cpu_reference() -> str:
    """SCOUT64 on the device (the fused kernel, when triton is there) is the reference's bits."""
    device, checked = cuda(), 0
    for dtype in DTYPES:
        for shape in ((), (1,), (7,), (1023,), (129, 513), (3, 1 << 20), (0, 4)):
            host = (torch.randn(shape) * 100).to(dtype)
            there = host.to(device)
            if algorithm_of(there) != "scout64" or signature(there) != scout64(host):
                raise AssertionError(f"{dtype} of shape {shape}: device and CPU reference differ")
            turned = there.mT if there.dim() > 1 else there
            if signature(turned) != scout64(turned.cpu()):
                raise AssertionError(f"{dtype} of shape {shape}: transposed view differs")
            checked += 2
    fused = "fused Triton kernel" if _has_triton() else "torch operations (no triton)"
    return f"{checked} tensors bit-equal, {fused}"


def signature_speed() -> str:
    """GB/s of the signature beside a device copy, interleaved."""
    device = cuda()
    lines = []
    for mebibytes in (1, 64, 512):
        tensor = torch.randn(mebibytes << 18, device=device)
        twin = torch.empty_like(tensor)
        sign, copy = _paired(partial(signatures, [tensor]), partial(twin.copy_, tensor))
        size = tensor.nbytes / 1e9
        lines.append(f"{mebibytes} MiB: {size / sign:.0f} (copy reads at {size / copy:.0f})")
    return "GB/s signed " + ", ".join(lines)


def every_flipped_bit_is_seen_on_the_device() -> str:
    """One flipped bit anywhere in 2^20 elements changes the signature."""
    device = cuda()
    tensor = torch.randn(1 << 20, device=device)
    raw = tensor.view(torch.int32)
    before = signature(tensor)
    for _ in range(500):
        place = int(torch.randint(raw.numel(), (1,)))
        mask = 1 << int(torch.randint(31, (1,)))
        raw[place] ^= mask
        if signature(tensor) == before:
            raise AssertionError(f"bit mask {mask:#x} of element {place} was missed")
        raw[place] ^= mask
    return "500 random flips, none missed"


def events_time_device_work() -> str:
    """CUDA events count device time: twice the work takes about twice as long."""
    device = cuda()
    clock = clock_for(device)
    matrix = torch.randn(4096, 4096, device=device)

    def work(times: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(times):
                torch.mm(matrix, matrix)

        return run

    clock.measure(work(5))
    once = min(clock.measure(work(10)).compute_s for _ in range(5))
    twice = min(clock.measure(work(20)).compute_s for _ in range(5))
    if not 1.6 < twice / once < 2.4:
        raise AssertionError(f"20 products take {twice / once:.2f} times as long as 10")
    return f"{clock.compares}: 10 products {once * 1e3:.2f} ms, 20 products {twice * 1e3:.2f} ms"


def replay_is_reproducible_and_leaves_training_alone() -> str:
    """Replay of a real block in bf16 autocast with dropout: equal bits, nothing touched."""
    device = cuda()
    module = Block(GPTConfig(width=1024, heads=16, dropout=0.1)).to(device)
    capture = _capture(module, torch.randn(8, 512, 1024, device=device, requires_grad=True))
    before = {n: (p.detach().clone(), p.grad) for n, p in module.named_parameters()}
    rng = get_rng(device)
    found = _replay(module, capture, device, repeats=5)
    after = get_rng(device)
    if found.outputs[0] != found.outputs[-1]:
        raise AssertionError("two replays of one call differ: these kernels do not qualify")
    if any(not torch.equal(rng[name], after[name]) for name in rng):
        raise AssertionError("the random generators moved")
    for name, parameter in module.named_parameters():
        value, grad = before[name]
        if not torch.equal(parameter, value) or parameter.grad is not grad:
            raise AssertionError(f"{name} was touched")
    times = [timing.compute_s * 1e3 for timing in found.calls]
    spread = statistics.pstdev(times[1:]) / statistics.mean(times[1:])
    return f"5 repeats, fastest {min(times):.2f} ms, spread {spread:.1%}, equal bits"


def a_changed_weight_changes_the_replay() -> str:
    """One low mantissa bit of one weight changes theta and the results."""
    device = cuda()
    module = Block(GPTConfig(width=256, heads=4)).to(device)
    capture = _capture(module, torch.randn(2, 64, 256, device=device, requires_grad=True))
    first = _replay(module, capture, device, repeats=2)
    with torch.no_grad():
        module.up.weight.view(torch.int32)[3, 5] ^= 1
    second = _replay(module, capture, device, repeats=2)
    if first.theta == second.theta:
        raise AssertionError("the parameters' signature did not change")
    changed = [k for k, v in first.outputs[0].items() if second.outputs[0][k] != v]
    return f"parameters changed, and {', '.join(changed) or 'no result'}"


def optimizer_updates_replay() -> str:
    """The replayed slice of fused and foreach AdamW is the slice of the real update."""
    device = cuda()
    for flags in ({"fused": True}, {"foreach": True}):
        parameter = nn.Parameter(torch.randn(1000, 300, device=device))
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, **flags)
        for _ in range(3):
            recorder = OptimizerRecorder(optimizer, round_=1, max_elements=4096)
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        assert recorder.arguments is not None
        taken = recorder.arguments
        (call,), _ = taken.rebuild(taken.tensors, taken.constants)
        again = updated(optimizer, call)[0]
        if not torch.equal(again, parameter.detach().view(-1)[4096:8192]):
            raise AssertionError(f"{flags}: the replayed update differs from the real one")
    return "fused and foreach AdamW: bit-equal slices"


def enable_resiliency_on_one_gpu() -> str:
    """The one-line entry on a single process: coverage says that nobody can be compared."""
    device = cuda()
    import torch.distributed as dist

    from scout_core import enable_resiliency

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).to(device)
            optimizer = torch.optim.AdamW(model.parameters())
            session = enable_resiliency(
                model, optimizer, {"interval_steps": 1, "on_error": "raise"}, run_dir=folder
            )
            for _ in range(4):
                model(torch.randn(8, 64, device=device)).sum().backward()
                optimizer.step()
            found, checks = session.incidents(), session.check_count
            session.close()
        finally:
            dist.destroy_process_group()
    if found or checks != 4:
        raise AssertionError(f"{checks} checks, incidents {found}")
    return "4 checks on one rank, no incident, coverage 'none'"


def row_counts_are_logged_without_waiting() -> str:
    """Log row counts that are on the device while every synchronisation is an error."""
    device = cuda()
    log = RowLog(8, capacity_calls=2048)
    counts = torch.arange(8, device=device)
    log.add(1, counts, 28)  # the buffer is made here
    torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    try:
        for _ in range(1000):
            log.add(2, counts, 28)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    spent = time.perf_counter() - begin
    assert log.take().calls == [(1, tuple(range(8))), *[(2, tuple(range(8)))] * 1000]
    return f"{spent / 1000 * 1e6:.1f} us per call of an expert stage"


PARTS = (
    signatures_equal_the_cpu_reference,
    signature_speed,
    every_flipped_bit_is_seen_on_the_device,
    events_time_device_work,
    replay_is_reproducible_and_leaves_training_alone,
    a_changed_weight_changes_the_replay,
    optimizer_updates_replay,
    row_counts_are_logged_without_waiting,
    enable_resiliency_on_one_gpu,
)


def run() -> dict[str, object]:
    """Run all parts; a part that fails does not keep the others from running."""
    end = time.monotonic() + DEADLINE_S
    outcomes = []
    for part in PARTS:
        name = part.__name__.replace("_", " ")
        if time.monotonic() > end:
            outcomes.append(Outcome(name, "skipped", f"{DEADLINE_S:.0f} s are used up"))
            continue
        try:
            outcomes.append(Outcome(name, "ok", part()))
        except Skipped as reason:
            outcomes.append(Outcome(name, "skipped", str(reason)))
        except Exception:  # noqa: BLE001 -- shown in the table; the next part runs
            outcomes.append(Outcome(name, "FAILED", traceback.format_exc(limit=3)))
    return {"outcomes": outcomes}


def main() -> None:
    """Print the table; exit 1 when a part failed."""
    outcomes: list[Outcome] = run()["outcomes"]  # type: ignore[assignment]
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    table = Table(
        "part", "state", "figures", title=f"GPU check on {where}, torch {torch.__version__}"
    )
    for outcome in outcomes:
        table.add_row(*outcome)
    Console().print(table)
    if any(outcome.state == "FAILED" for outcome in outcomes):
        sys.exit(1)


def _capture(module: nn.Module, x: torch.Tensor) -> Capture:
    device = x.device
    recorder = Recorder(
        module, lambda a, k: Capture(take_apart(a, k), get_rng(device), Modes.of(module, device))
    )
    with torch.autocast(device.type, torch.bfloat16):
        module(x)
    assert recorder.capture is not None
    return recorder.capture


def _replay(module: nn.Module, capture: Capture, device: torch.device, repeats: int) -> Replayed:
    taken = capture.arguments
    inputs = Inputs(
        taken, taken.tensors, taken.constants, taken.needs_grad, capture.rng, capture.modes
    )
    tools = Device(
        lambda module: contextlib.nullcontext({}),
        plain_leaf,
        lambda: get_rng(device),
        lambda state: set_rng(state, device),
        clock_for(device),
        device,
    )
    return replay(module, inputs, tools, repeats)


def _paired(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of both, run in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(30):
        for times, work in zip(seconds, (first, second), strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return statistics.median(seconds[0][5:]), statistics.median(seconds[1][5:])


def _has_triton() -> bool:
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

        return True
    return False


if __name__ == "__main__":
    main()
