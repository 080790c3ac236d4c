"""Capture and isolated replay on one process: the same numbers, and training untouched."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scout_core.evidence.capture import (
    Arguments,
    Capture,
    Modes,
    Recorder,
    blank,
    take_apart,
    tensors_of,
)
from scout_core.evidence.clock import CpuClock, Timing
from scout_core.evidence.exchange import run_threads
from scout_core.evidence.isolate import isolated, plain_leaf
from scout_core.evidence.optimizer_replay import OptimizerRecorder, slice_of, updated
from scout_core.evidence.replay import Device, Inputs, Replayed, replay
from scout_core.evidence.rest import RestWatch
from scout_core.evidence.rng import get_rng, set_rng
from scout_core.evidence.stand_in import stand_in

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Dropout, a buffer that its forward updates, an attribute it assigns, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.dropout(torch.relu(self.a(x)), 0.3, self.training)
        out: torch.Tensor = self.norm(self.b(hidden)) * scale
        return out


def capture_of(module: nn.Module, *args: Any, **kwargs: Any) -> Capture:
    recorder = Recorder(
        module, lambda a, k: Capture(take_apart(a, k), get_rng(CPU), Modes.of(module, CPU))
    )
    module(*args, **kwargs)
    assert recorder.capture is not None
    return recorder.capture


def device(whole: Any = None) -> Device:
    import contextlib

    return Device(
        whole or (lambda module: contextlib.nullcontext({})),
        plain_leaf,
        lambda: get_rng(CPU),
        lambda state: set_rng(state, CPU),
        CpuClock(),
        CPU,
    )


def replayed(module: nn.Module, capture: Capture, **changes: Any) -> Replayed:
    taken = capture.arguments
    inputs = Inputs(
        taken, taken.tensors, taken.constants, taken.needs_grad, capture.rng, capture.modes
    )
    with_changes = dataclasses.replace(device(), **changes)
    return replay(module, inputs, with_changes, repeats=2)


def memory(module: nn.Module) -> dict[str, Any]:
    state = {name: value.clone() for name, value in module.state_dict().items()}
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    return {"state": state, "grads": grads, "rng": torch.get_rng_state()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a is b if a is None else torch.equal(a, b)


def test_a_replay_leaves_parameters_gradients_buffers_attributes_and_rng_untouched() -> None:
    module = Layer()
    fired: list[str] = []
    module.a.weight.register_hook(lambda grad: fired.append("tensor hook"))
    module.a.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulate"))
    module.register_forward_hook(lambda *a: fired.append("forward"))
    module.a.register_full_backward_hook(lambda *a: fired.append("backward"))
    capture = capture_of(module, torch.randn(4, 6, requires_grad=True), scale=0.5)
    module(torch.randn(4, 6, requires_grad=True)).sum().backward()
    before, calls = memory(module), module.calls
    fired.clear()
    replayed(module, capture)
    assert same(memory(module), before)
    assert module.calls == calls
    assert fired == []


def test_a_replay_repeats_itself_bit_for_bit_with_dropout() -> None:
    module = Layer()
    found = replayed(module, capture_of(module, torch.randn(4, 6, requires_grad=True)))
    assert found.outputs[0] == found.outputs[1]
    assert len(found.calls) == 2
    assert found.finite


@pytest.mark.parametrize("stage", ["output", "input_grad", "parameter_grad"])
def test_a_replay_sees_a_change_of_every_stage(stage: str) -> None:
    module = nn.Linear(5, 3)
    x = torch.randn(2, 5, requires_grad=True)
    first = replayed(module, capture_of(module, x)).outputs[0]
    original = module.forward

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, *g: Any) -> Any:
            return g[0] * (1 if stage == "output" else 1 + 1e-6)

    def changed(t: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Wrong.apply(original(t))
        return out + 1e-6 if stage == "output" else out

    module.forward = changed  # type: ignore[method-assign]
    assert replayed(module, capture_of(module, x)).outputs[0][stage] != first[stage]


def test_the_replayed_gradients_are_those_of_the_real_module() -> None:
    module = Layer()
    x = torch.randn(4, 6, requires_grad=True)
    capture = capture_of(module, x)
    with isolated(module, {}) as leaves:
        set_rng(capture.rng, CPU)
        y = module.forward(capture.arguments.tensors[0])
        grads = torch.autograd.grad(y, list(leaves.values()), y.detach())
    set_rng(capture.rng, CPU)
    twin = copy.deepcopy(module)
    real = twin(x)
    real.backward(real.detach())
    for (name, _), grad in zip(leaves.items(), grads, strict=True):
        assert torch.equal(twin.get_parameter(name).grad, grad)  # type: ignore[arg-type]


def test_whole_parameters_are_used_in_place_of_the_live_ones() -> None:
    import contextlib

    module = nn.Linear(3, 3, bias=False)
    capture = capture_of(module, torch.ones(1, 3, requires_grad=True))
    double = {module.weight: module.weight.detach() * 2}
    plain = replayed(module, capture)
    other = replayed(module, capture, whole=lambda m: contextlib.nullcontext(double))
    assert other.theta != plain.theta
    assert other.outputs[0]["output"] != plain.outputs[0]["output"]


def test_gradients_are_taken_from_where_the_framework_has_put_them() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    plain = replayed(layer, capture_of(layer, x))
    elsewhere = replayed(layer, capture_of(layer, x), gradient_of=lambda leaf, grad: grad * 2)
    for stages, moved in zip(plain.outputs, elsewhere.outputs, strict=True):
        different = {stage for stage in stages if stages[stage] != moved[stage]}
        assert different == {"parameter_grad"}


def test_an_exception_in_the_forward_puts_everything_back() -> None:
    module = Layer()
    capture = capture_of(module, torch.randn(4, 6))
    before, hooks = memory(module), len(module._forward_hooks)

    def fail(*args: Any) -> Any:
        raise RuntimeError("on purpose")

    module.norm.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on purpose"):
        replayed(module, capture)
    assert same(memory(module), before)
    assert len(module._forward_hooks) == hooks


class Checkpointed(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, scale, use_reentrant=False)
        return out


def test_activation_checkpointing_replays() -> None:
    module = Checkpointed()
    found = replayed(module, capture_of(module, torch.randn(4, 6, requires_grad=True)))
    assert found.outputs[0] == found.outputs[1]


def test_a_recorder_takes_the_first_call_with_gradients_and_removes_itself() -> None:
    module = nn.Linear(2, 2)
    recorder = Recorder(module, lambda a, k: Capture(take_apart(a, k), {}, Modes.of(module, CPU)))
    with torch.no_grad():
        module(torch.zeros(1, 2))
    assert recorder.capture is None
    module(torch.ones(3, 2))
    module(torch.zeros(5, 2))
    assert recorder.capture is not None
    assert recorder.capture.arguments.tensors[0].shape == (3, 2)
    assert not module._forward_pre_hooks


def test_a_recorder_that_fails_never_raises_into_the_forward() -> None:
    module = nn.Linear(2, 2)

    def fail(args: Any, kwargs: Any) -> Capture:
        raise ValueError("on purpose")

    recorder = Recorder(module, fail)
    module(torch.ones(1, 2))
    assert isinstance(recorder.error, ValueError)


@dataclass
class Packed:
    lengths: torch.Tensor
    name: str


def rebuilt(taken: Arguments) -> Any:
    return taken.rebuild(taken.tensors, taken.constants)


def test_nested_arguments_are_taken_apart_and_put_together_again() -> None:
    args = (torch.ones(2), [1, {"b": None, "a": torch.zeros(3)}], Packed(torch.arange(2), "p"))
    taken = take_apart(args, {"mask": (True, torch.float32)})
    again, kwargs = rebuilt(taken)
    assert torch.equal(again[0], args[0])
    assert again[1][1]["b"] is None
    assert isinstance(again[2], Packed)
    assert torch.equal(again[2].lengths, torch.arange(2))
    assert kwargs == {"mask": (True, torch.float32)}
    assert taken.unknown == ""


def test_the_order_of_a_dict_does_not_matter() -> None:
    one = take_apart((), {"a": 1, "b": torch.ones(1)})
    two = take_apart((), {"b": torch.ones(1), "a": 1})
    assert one.skeleton == two.skeleton
    assert one.constants == two.constants


def test_other_nesting_gives_another_skeleton() -> None:
    skeletons = {
        take_apart(args, {}).skeleton
        for args in ((1,), (torch.ones(1),), ([1],), ((1,),), ({"a": 1},), (torch.float32,), ())
    }
    assert len(skeletons) == 7


def test_an_unknown_type_is_named_and_does_not_raise() -> None:
    assert take_apart((object(),), {}).unknown == "object"


def test_captured_tensors_are_copies() -> None:
    x = torch.ones(2)
    taken = take_apart((x,), {})
    x.zero_()
    assert torch.equal(taken.tensors[0], torch.ones(2))
    assert tensors_of([x])[0] is x


def test_a_blank_has_the_sources_shape_and_dtype() -> None:
    leaf = take_apart((torch.ones(2, 3, dtype=torch.bfloat16),), {}).leaves()[0]
    assert blank(leaf, torch.ones(1)).shape == (2, 3)
    assert blank(leaf, torch.ones(1)).dtype is torch.bfloat16


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_replayed_update_of_a_slice_is_the_slice_of_the_real_update(
    name: str, steps: int
) -> None:
    parameter = nn.Parameter(torch.randn(9, 7))
    optimizer = OPTIMIZERS[name]([parameter])
    fired: list[int] = []
    optimizer.register_step_post_hook(lambda *a: fired.append(1))
    for _ in range(steps):
        recorder = OptimizerRecorder(optimizer, round_=1, max_elements=20)
        parameter.grad = torch.randn(9, 7)
        optimizer.step()
    fired.clear()
    taken = recorder.arguments
    assert taken is not None
    (call,), _ = rebuilt(taken)
    state = {k: v.clone() for k, v in optimizer.state[parameter].items() if v is not None}
    after = updated(optimizer, call)
    assert torch.equal(after[0], parameter.detach().view(-1)[20:40])  # round 1: second slice
    assert fired == []
    assert all(torch.equal(optimizer.state[parameter][k], v) for k, v in state.items())


def test_optimizer_slices_rotate_over_parameters_and_offsets() -> None:
    parameters = [nn.Parameter(torch.arange(6.0)), nn.Parameter(torch.arange(10.0, 14.0))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    firsts = []
    for round_ in range(4):
        taken = slice_of(optimizer, round_, 3)
        assert taken is not None
        (call,), _ = rebuilt(taken)
        firsts.append(float(call["parameter"][0]))
    assert firsts == [0.0, 10.0, 3.0, 13.0]


def test_without_gradients_there_is_no_slice() -> None:
    assert slice_of(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 0, 3) is None


def test_state_that_moves_between_two_updates_is_seen_once() -> None:
    values = {"w": 1, "v": 1}
    watch = RestWatch(lambda: dict(values))  # type: ignore[arg-type]
    watch.remember()
    values["w"] = 2
    watch.look()
    watch.look()
    assert watch.changed == ("w",)
    watch.remember()
    assert watch.changed == ()


def test_stand_ins_are_finite_alike_on_all_ranks_and_differ_by_seed() -> None:
    poisoned = torch.full((3, 4), float("nan"), dtype=torch.bfloat16)
    twin = stand_in(poisoned, 7)
    assert torch.isfinite(twin).all()
    assert torch.equal(twin, stand_in(poisoned.clone(), 7))
    assert not torch.equal(twin, stand_in(poisoned, 8))
    assert torch.equal(stand_in(torch.arange(3), 1), torch.arange(3))


def test_the_cpu_clock_counts_this_threads_work() -> None:
    timing = CpuClock().measure(lambda: sum(range(20000)))
    assert isinstance(timing, Timing)
    assert timing.compute_s > 0
    assert timing.wall_s > 0


def test_threads_exchange_in_rank_order() -> None:
    def body(exchange: Any) -> Any:
        parts = exchange.all_gather(bytes([exchange.rank]), (0, 2)) if exchange.rank != 1 else []
        tensor = torch.full((2,), float(exchange.rank))
        exchange.broadcast(tensor, 1, (0, 1, 2))
        return parts, tensor.tolist(), exchange.all_reduce_max([exchange.rank, -exchange.rank])

    results = run_threads(3, body)
    assert [r[0] for r in results] == [[b"\0", b"\2"], [], [b"\0", b"\2"]]
    assert all(r[1] == [1.0, 1.0] and r[2] == [2, 0] for r in results)


def test_a_thread_that_does_not_come_ends_the_exchange_in_time() -> None:
    def body(exchange: Any) -> Any:
        if exchange.rank != 1:
            exchange.barrier((0, 1, 2))

    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        run_threads(3, body, timeout_s=0.2)
