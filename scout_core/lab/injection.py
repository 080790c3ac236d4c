"""Apply faults to one rank of a running job, from outside, and take them away again.

A fault imitates broken hardware: it acts wherever the faulty rank does that kind of work, in
training and in replay alike. Nothing in the product knows of it: modules, optimizers and the
session's framework and exchange are wrapped.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo, local_of, tensors_of
from scout_core.evidence.row_log import rows_of
from scout_core.integration.expert_calls import ExpertCalls
from scout_core.lab.faults import Corruption, FaultAt, Persistence, Surface


@dataclass(frozen=True)
class Target:
    """What a fault can act on, on one rank."""

    layers: list[nn.Module]
    optimizer: torch.optim.Optimizer
    framework: Any = None
    """The session's Framework, for gather faults."""
    exchange: Any = None
    """The session's Exchange, for broadcast and communication faults."""
    topology: Topology | None = None
    """Addresses and hosts, for communication faults."""
    run_dir: pathlib.Path | None = None
    """Where a hang is reported; it ends then."""
    experts: Sequence[tuple[nn.Module, ExpertCalls]] = ()
    """Expert stages of all layers, for faults at one row count."""


Corrupt = Callable[[torch.Tensor], None]
HANG_LASTS_S = 60.0  # a hang that nobody reports ends by itself
JOB_WIDE = (
    "contention",
    "group_slowdown",
    "rotating_pauses",
    "sequence_imbalance",
    "slow_loading",
)
COMPUTES_SLOWLY = ("straggler", "group_slowdown", "stage_imbalance")
IN_THE_DATA = ("sequence_imbalance", "slow_loading")
"""Kinds that the drill itself carries out, where it makes its batches."""


def acts_on(fault: FaultAt, rank: int, topology: Topology) -> bool:
    """Tell whether a fault has to be injected on a rank."""
    if fault.kind in JOB_WIDE:
        return True
    if fault.kind == "slow_nic":
        return topology.hosts[rank] == topology.hosts[fault.rank]
    if fault.kind == "stage_imbalance":
        return topology.dense[rank].p == topology.dense[fault.rank].p
    return rank == fault.rank


def inject(fault: FaultAt, target: Target) -> Undo:
    """Apply the fault on this rank, from now on; call it at the start of its step.

    Returns:
        What takes the fault away again. A flipped parameter stays flipped: the caller restores
        the state it wants restored.

    Raises:
        ScoutError: the layer does not exist.
    """
    if fault.kind in IN_THE_DATA:
        return lambda: None
    if not 0 <= fault.layer < len(target.layers):
        raise ScoutError(
            f"fault layer={fault.layer}: the model has layers 0..{len(target.layers) - 1}"
        )
    layer = target.layers[fault.layer]
    if fault.kind in COMPUTES_SLOWLY:
        undos = [_slow(each, fault.percent / 100.0) for each in target.layers]
        return lambda: _all(undos)
    if fault.kind in ("slow_nic", "slow_link", "slow_machine", "contention"):
        return _slow_groups(fault, target)
    if fault.kind == "rotating_pauses":
        return _pause_in_turn(fault, target)
    if fault.kind == "hang":
        return _wrap_forward(layer, lambda out: _stand_still(out, target.run_dir))
    return _corrupt(fault, target, layer)


def _corrupt(fault: FaultAt, target: Target, layer: nn.Module) -> Undo:
    surface = Surface.GRADIENT if fault.kind == "gradient" else fault.surface
    corrupt = Corruption(fault)
    if fault.rows is not None:
        function = _CorruptOutput if surface is Surface.OUTPUT else _CorruptGradient
        undos = [_at_rows(fault.rows, *stage, function, corrupt) for stage in target.experts]
        return lambda: _all(undos)
    if surface is Surface.PARAMETER:
        Corruption(replace(fault, persistence=Persistence.PERSISTENT))(_largest_parameter(layer))
        return lambda: None
    if surface is Surface.OPTIMIZER:
        return _wrap_optimizer(target.optimizer, corrupt)
    if surface is Surface.GATHER:
        return _wrap_gather(target.framework, layer, corrupt)
    if surface is Surface.BROADCAST:
        return _wrap_broadcast(target.exchange, corrupt)
    function = _CorruptOutput if surface is Surface.OUTPUT else _CorruptGradient
    return _wrap_forward(layer, lambda out: _map_first(out, _through(function, corrupt)))


def _at_rows(
    count: int,
    stage: nn.Module,
    calls: ExpertCalls,
    function: type[torch.autograd.Function],
    corrupt: Corruption,
) -> Undo:
    """Corrupt what the first expert with that many rows computes."""
    original = stage.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        rows = rows_of(calls.counts(args, kwargs)[0])
        out = original(*args, **kwargs)
        if count not in rows:
            return out
        expert = rows.index(count)
        part = _through(function, lambda tensor: corrupt(part_of(tensor, rows, expert)))
        return _map_first(out, part)

    return _replace_forward(stage, forward)


def part_of(tensor: torch.Tensor, rows: tuple[int, ...], expert: int) -> torch.Tensor:
    """Return one expert's part of a stage's results.

    Args:
        tensor: (rows of all experts and paddings, width), or (senders, experts, capacity, width).
    """
    if tensor.dim() > 2:
        return tensor[:, expert]
    start = sum(rows[:expert])
    return tensor[start : start + rows[expert]]


def _all(undos: list[Undo]) -> None:
    for undo in undos:
        undo()


class _CorruptOutput(torch.autograd.Function):
    """Identity whose result is corrupted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, corrupt: Corrupt) -> torch.Tensor:
        result = tensor.clone()
        corrupt(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _CorruptGradient(torch.autograd.Function):
    """Identity whose gradient is corrupted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, corrupt: Corrupt) -> torch.Tensor:
        ctx.corrupt = corrupt
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result = grads[0].clone()
        ctx.corrupt(result)
        return result, None


class _Stopwatch(torch.autograd.Function):
    """Identity that calls `passed` when the backward pass comes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passed: Callable[[], None]) -> torch.Tensor:
        ctx.passed = passed
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.passed()
        return grads[0], None


def _through(
    function: type[torch.autograd.Function], argument: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    apply: Callable[[torch.Tensor, Any], torch.Tensor] = function.apply
    return lambda tensor: apply(tensor, argument)


def _slow(module: nn.Module, fraction: float) -> Undo:
    """Make forward and backward of a module burn a fraction of their own CPU time on top."""
    original = module.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        started = 0.0

        def backward_starts() -> None:
            nonlocal started
            started = time.thread_time()

        def backward_ends() -> None:
            if started:
                burn((time.thread_time() - started) * fraction)

        begin = time.thread_time()
        args = _map_first(args, _through(_Stopwatch, backward_ends))
        out = original(*args, **kwargs)
        burn((time.thread_time() - begin) * fraction)
        return _map_first(out, _through(_Stopwatch, backward_starts))

    return _replace_forward(module, slow)


def burn(seconds: float) -> None:
    """Use up CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _stand_still(out: Any, run_dir: pathlib.Path | None) -> Any:
    """Wait until an incident is reported, at most for a while."""
    reported = None if run_dir is None else run_dir / "incidents.jsonl"
    end = time.monotonic() + HANG_LASTS_S
    while time.monotonic() < end and not (reported is not None and reported.exists()):
        time.sleep(0.05)
    return out


def _slow_groups(fault: FaultAt, target: Target) -> Undo:
    """Delay the timed collectives of the groups that the fault concerns, on this rank."""
    assert target.topology is not None
    topology, exchange = target.topology, target.exchange
    original = exchange.reduce

    def reduce(tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if _concerns(fault, ranks, topology):
            time.sleep(fault.delay_s)
        original(tensor, ranks)

    exchange.reduce = reduce
    return lambda: delattr(exchange, "reduce")


def _concerns(fault: FaultAt, ranks: tuple[int, ...], topology: Topology) -> bool:
    if fault.kind == "slow_nic":
        return len({topology.hosts[rank] for rank in ranks}) > 1
    if fault.kind == "slow_link":
        axis = "t" if any(place.t for place in topology.dense) else "s"
        return ranks in topology.axis_groups(axis) and fault.rank in ranks
    return True  # slow_machine: every group of this rank; contention: every group


def _pause_in_turn(fault: FaultAt, target: Target) -> Undo:
    """Collect real garbage before the update, on a different rank at each step."""
    exchange = target.exchange
    steps = 0

    def pause(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % exchange.world_size == exchange.rank:
            end = time.perf_counter() + fault.delay_s
            while time.perf_counter() < end:
                cycle: list[Any] = [[] for _ in range(20_000)]
                cycle.append(cycle)
                del cycle
                gc.collect()

    return target.optimizer.register_step_pre_hook(pause).remove


def _wrap_forward(module: nn.Module, change: Callable[[Any], Any]) -> Undo:
    original = module.forward
    return _replace_forward(module, lambda *args, **kwargs: change(original(*args, **kwargs)))


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    had = vars(module).get("forward")
    module.forward = forward

    def undo() -> None:
        if had is None:
            vars(module).pop("forward", None)
        else:
            module.forward = had

    return undo


def _map_first(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply to the first floating-point tensor of a tensor or a tuple; DTensors at their local."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            if any(t.is_floating_point() for t in tensors_of(part)):
                return (*value[:i], _map_first(part, change), *value[i + 1 :])
        return value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if isinstance(value, DTensor):
        local = change(value.to_local())
        return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False)
    return change(value)


def _wrap_optimizer(optimizer: torch.optim.Optimizer, corrupt: Corruption) -> Undo:
    """Give the optimizer a subclass whose update corrupts its largest parameter with state."""
    kind = type(optimizer)
    bare = getattr(kind.step, "__wrapped__", kind.step)

    class Faulty(kind):  # type: ignore[misc, valid-type]
        def step(self, *args: Any, **kwargs: Any) -> Any:
            result = bare(self, *args, **kwargs)
            touched = [
                p for group in self.param_groups for p in group["params"] if p.grad is not None
            ]
            if touched:
                corrupt(max(touched, key=lambda p: local_of(p.detach()).numel()))
            return result

    Faulty.__name__ = kind.__name__
    optimizer.__class__ = Faulty
    optimizer._patch_step_function()

    def undo() -> None:
        optimizer.__class__ = kind

    return undo


def _wrap_gather(framework: Any, layer: nn.Module, corrupt: Corruption) -> Undo:
    original = framework.whole

    @contextlib.contextmanager
    def whole(module: nn.Module) -> Any:
        with original(module) as materialised:
            if module is layer:
                live = _largest_parameter(module)
                bad = materialised.get(live, live).detach().clone()
                corrupt(bad)
                yield {**materialised, live: bad}
            else:
                yield materialised

    framework.whole = whole
    return lambda: delattr(framework, "whole")


def _wrap_broadcast(exchange: Any, corrupt: Corruption) -> Undo:
    original = exchange.broadcast

    def broadcast(tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None:
        original(tensor, source, ranks)
        if tensor.is_floating_point() and tensor.dim() > 0:
            corrupt(tensor)

    exchange.broadcast = broadcast
    return lambda: delattr(exchange, "broadcast")


def _largest_parameter(module: nn.Module) -> nn.Parameter:
    return max(module.parameters(), key=lambda p: local_of(p.detach()).numel())
