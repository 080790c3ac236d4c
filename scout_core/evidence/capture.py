"""One sampled call of a module: its arguments, the random state and the modes it ran under.

A recorder is armed only for the step whose end will replay the call, so nothing is kept alive, and
no hook is installed, on any other step.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Undo = Callable[[], None]


class Leaf(NamedTuple):
    """What must be known of a tensor argument to receive it from another rank."""

    dtype: str
    shape: tuple[int, ...]  # of the local tensor
    needs_grad: bool
    global_shape: tuple[int, ...]  # of a DTensor; () for a plain tensor


@dataclass(frozen=True)
class Arguments:
    """Nested positional and named arguments, taken apart into a skeleton, constants and tensors.

    The skeleton is text: equal skeletons mean the same nesting and the same kinds of values.
    """

    skeleton: str
    constants: tuple[Any, ...]
    """JSON values (None, bool, int, float, str) in traversal order; sent by the source."""
    tensors: tuple[torch.Tensor, ...]
    """Detached copies in traversal order."""
    needs_grad: tuple[bool, ...]
    rebuild: Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, Any]]
    """Put tensors and constants back: returns (args, kwargs)."""
    unknown: str = ""
    """Name of the first argument type that cannot be compared; empty when there is none."""

    def leaves(self) -> list[Leaf]:
        """Describe the tensors, in traversal order."""
        return [_describe(t, g) for t, g in zip(self.tensors, self.needs_grad, strict=True)]


@dataclass(frozen=True)
class Modes:
    """Global modes of the call that change its numbers."""

    autocast: tuple[bool, torch.dtype]
    training: bool

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> Modes:
        """Read the modes in force now."""
        kind = device.type
        return cls(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)), module.training
        )


@dataclass(frozen=True)
class Capture:
    """A call that was recorded."""

    arguments: Arguments
    rng: dict[str, torch.Tensor]
    """Random state before the call, by generator name."""
    modes: Modes


class Recorder:
    """Records the first call with gradients of one module, once, and then removes itself."""

    def __init__(self, module: nn.Module, take: Callable[[Any, Any], Capture]) -> None:
        """Arm the recorder.

        Args:
            take: makes the capture of (args, kwargs); an exception in it is kept in `error` and
                never reaches the forward.
        """
        self.capture: Capture | None = None
        self.error: Exception | None = None
        self._take = take
        self._undo: Undo | None = before_calls(module, self._on_call)

    def close(self) -> None:
        """Remove the recorder from the module."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._undo is None:
            return
        try:
            self.capture = self._take(args, kwargs)
        except Exception as error:  # noqa: BLE001 -- guard: a hook of SCOUT never raises
            self.error = error
        self.close()


Before = Callable[[nn.Module, Any, Any], Any]
After = Callable[[Any], None]


def before_calls(module: nn.Module, hook: Before) -> Undo:
    """Call the hook with (module, args, kwargs) before each forward; returns the undo."""
    return around_calls(module, hook, None)


def around_calls(module: nn.Module, before: Before, after: After | None) -> Undo:
    """Call `before(module, args, kwargs)`, and `after` with its result, around each forward.

    Hooks that other libraries have registered so far run outside of the two.
    """
    if module._compiled_call_impl is not None:
        return _around_compiled(module, before, after)
    begun: list[Any] = []

    def enter(inner: nn.Module, args: Any, kwargs: Any) -> None:
        result = before(inner, args, kwargs)
        if after is not None:
            begun.append(result)

    def leave(*_: Any) -> None:
        if after is not None and begun:
            after(begun.pop())

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True)]
    if after is not None:
        hooks.append(module.register_forward_hook(leave, prepend=True))

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


class _Watched:
    """Entry point of a module compiled in place, with watchers around it.

    # Note [In-place compiled modules]: `module.compile()` traces hooks into its graph, so a
    # hook would be ignored or recompile it. Its entry point is called eagerly: wrap that.
    """

    def __init__(self, module: nn.Module) -> None:
        self.compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        self.watchers: list[tuple[Before, After | None]] = []
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begun = [(after, before(self._module, args, kwargs)) for before, after in self.watchers]
        out = self.compiled(*args, **kwargs)
        for after, result in reversed(begun):
            if after is not None:
                after(result)
        return out


def _around_compiled(module: nn.Module, before: Before, after: After | None) -> Undo:
    entry = module._compiled_call_impl
    if not isinstance(entry, _Watched):
        entry = module._compiled_call_impl = _Watched(module)
    watched, watcher = entry, (before, after)
    watched.watchers.append(watcher)

    def remove() -> None:
        watched.watchers = [each for each in watched.watchers if each is not watcher]
        if not watched.watchers and module._compiled_call_impl is watched:
            module._compiled_call_impl = watched.compiled

    return remove


def take_apart(args: Any, kwargs: Any) -> Arguments:
    """Copy the tensors of a call and describe the rest.

    Dicts, lists, tuples, named tuples, dataclasses, FlexAttention's masks and what functions close
    over are entered; enums, dtypes, sizes and device types are part of the skeleton; a value of any
    other type makes the call not comparable.
    """
    walk = _Walk()
    build = walk.enter((args, kwargs))
    return Arguments(
        "".join(walk.skeleton),
        tuple(walk.constants),
        tuple(walk.tensors),
        tuple(walk.needs_grad),
        lambda tensors, constants: build(iter(tensors), iter(constants)),
        walk.unknown,
    )


def tensors_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in a nested value, in traversal order, without copying them."""
    walk = _Walk(copy=False)
    walk.enter(value)
    return walk.tensors


def blank(leaf: Leaf, like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor to receive a leaf into, on the device and mesh of `like`."""
    dtype = getattr(torch, leaf.dtype)
    local = torch.empty(leaf.shape, dtype=dtype, device=like.device)
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size(leaf.global_shape)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(tensor: torch.Tensor, needs_grad: bool) -> Leaf:
    whole = tuple(tensor.shape) if isinstance(tensor, DTensor) else ()
    local = local_of(tensor)
    return Leaf(str(local.dtype).removeprefix("torch."), tuple(local.shape), needs_grad, whole)


_Build = Callable[[Any, Any], Any]


class _Walk:
    """One traversal: collects tensors and constants, returns how to build the value again."""

    def __init__(self, copy: bool = True) -> None:
        self.skeleton: list[str] = []
        self.constants: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.needs_grad: list[bool] = []
        self.unknown = ""
        self._copy = copy

    def enter(self, value: Any) -> _Build:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or type(value) in (bool, int, float, str):
            self.constants.append(value)
            self.skeleton.append("c")
            return lambda tensors, constants: next(constants)
        if isinstance(value, dict):
            keys = sorted(value, key=repr)  # peers may have filled the dict in another order
            values = [value[key] for key in keys]
            return self._sequence(
                "dict", values, lambda vs: dict(zip(keys, vs, strict=True)), repr(keys)
            )
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._sequence(type(value).__name__, list(value), lambda vs: type(value)(*vs))
        if type(value) in (list, tuple):
            return self._sequence(type(value).__name__, list(value), type(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._object(value, [field.name for field in dataclasses.fields(value)])
        if _is_block_mask(value):
            return self._object(value, list(vars(value)))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return self._fixed(value)

    def _tensor(self, value: torch.Tensor) -> _Build:
        self.skeleton.append("D" if isinstance(value, DTensor) else "T")
        self.needs_grad.append(value.requires_grad)
        if self._copy:
            value = value.detach().clone(memory_format=torch.contiguous_format)
        self.tensors.append(value)
        return lambda tensors, constants: next(tensors)

    def _sequence(
        self, name: str, values: list[Any], make: Callable[[list[Any]], Any], extra: str = ""
    ) -> _Build:
        self.skeleton.append(f"{name}{extra}(")
        parts = [self.enter(value) for value in values]
        self.skeleton.append(")")
        return lambda tensors, constants: make([part(tensors, constants) for part in parts])

    def _object(self, value: Any, names: list[str]) -> _Build:
        parts = self._sequence(
            type(value).__qualname__, [getattr(value, name) for name in names], list
        )

        def make(tensors: Any, constants: Any) -> Any:
            twin = object.__new__(type(value))
            for name, part in zip(names, parts(tensors, constants), strict=True):
                object.__setattr__(twin, name, part)
            return twin

        return make

    def _function(self, function: types.FunctionType) -> _Build:
        """Enter what a function closes over: masks of attention are functions of local data.

        Functions of one definition are the same kind of value, so the copy has the same code.
        """
        code, inside = (
            function.__code__,
            [cell.cell_contents for cell in function.__closure__ or ()],
        )
        place = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}"
        parts = self._sequence(place, inside, list)

        def make(tensors: Any, constants: Any) -> Any:
            cells = tuple(types.CellType(part) for part in parts(tensors, constants))
            scope, defaults = function.__globals__, function.__defaults__
            twin = types.FunctionType(code, scope, function.__name__, defaults, cells)
            twin.__kwdefaults__ = function.__kwdefaults__
            return twin

        return make

    def _fixed(self, value: Any) -> _Build:
        if isinstance(value, torch.device):
            self.skeleton.append(value.type)
        elif isinstance(value, enum.Enum | torch.dtype | torch.Size | bytes):
            self.skeleton.append(repr(value))
        else:
            self.unknown = self.unknown or type(value).__qualname__
        return lambda tensors, constants: value


def _is_block_mask(value: Any) -> bool:
    """Recognise FlexAttention's masks without importing it; checked with torch 2.10 - 2.13."""
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("torch.nn.attention.flex_attention", "BlockMask")
