"""Attach SCOUT to jobs that `megatron.training.pretrain` runs, whoever calls it.

Functions of megatron.training that `pretrain` looks up by name are wrapped; nothing of them is
replaced. The same names and results serve megatron.training of 0.16 to 0.19. Nothing is wrapped
twice, and without `--scout` every wrapper passes its call through.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scout_core.errors import ScoutError

if TYPE_CHECKING:
    from scout_megatron.job import TrainingJob

_MARK = "_scout_original"
_running: list[TrainingJob] = []  # the job of this process, once it has been attached to


def watch() -> None:
    """Wrap what `pretrain` calls; calling it again changes nothing.

    Raises:
        ScoutError: megatron.training is not installed: megatron-core 0.16 comes without it.
    """
    arguments = _imported("megatron.training.arguments")
    training = _imported("megatron.training.training")
    _wrap(arguments, "add_megatron_arguments", _with_options)
    _wrap(training, "setup_model_and_optimizer", _attached)
    _wrap(training, "build_train_valid_test_data_loaders", _loading_watched)
    checkpointing = _imported("megatron.training.checkpointing")
    _wrap(training, "evaluate", _evaluating)
    _wrap(training, "load_checkpoint", _gated_load)
    _wrap(training, "save_checkpoint", _gated_save)
    _wrap(training, "train", _ending)
    _wrap(checkpointing, "schedule_async_save", _told_of_its_end)
    _wrap(checkpointing, "_async_delete_checkpoint_impl", _unless_kept)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ScoutError(
            f"{name} cannot be imported, so --scout has nothing to attach to; put a checkout of "
            "Megatron-LM or megatron-core >= 0.17 on PYTHONPATH, or call scout_megatron.attach in "
            "a training loop of your own"
        ) from error


def _wrap(module: ModuleType, name: str, around: Callable[..., Any]) -> None:
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(module, name, wrapped)


def _with_options(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    from scout_megatron.options import add_options

    return add_options(original(parser, *args, **kwargs))


def _attached(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    _attach(result[0], result[1])
    return result


def _attach(model: Any, optimizer: Any) -> None:
    """Attach once, if the user wants it."""
    from megatron.training import get_args

    if get_args().scout and not _running:
        from scout_megatron.job import TrainingJob

        _running.append(TrainingJob(get_args(), model, optimizer))


def _gated_load(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron loads before it hands the optimizer out: attach here, for the gate to choose."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    if given["optimizer"] is None or given["load_arg"] != "load" or _running:
        return original(*args, **kwargs)
    _attach(given["ddp_model"], given["optimizer"])
    if not _running or _running[0].gate is None:
        return original(*args, **kwargs)
    with _running[0].session.phase("checkpoint"):
        return _running[0].gate.load(original, *args, **kwargs)


def _gated_save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _running or _running[0].gate is None:
        return original(*args, **kwargs)
    with _running[0].session.phase("checkpoint"):
        return _running[0].gate.save(original, *args, **kwargs)


def _told_of_its_end(original: Callable[..., Any], request: Any) -> Any:
    if _running and _running[0].gate is not None:
        _running[0].gate.finish_later(request)
    return original(request)


def _unless_kept(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep a checkpoint that Megatron would delete because it is old."""
    call = inspect.signature(original).bind(*args, **kwargs)
    place = call.arguments["save_path"], call.arguments["iteration_to_delete"]
    if _running and _running[0].gate is not None and _running[0].gate.keeps(*place):
        return None
    return original(*args, **kwargs)


def _evaluating(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _running[0].session.phase("evaluation") if _running else contextlib.nullcontext():
        return original(*args, **kwargs)


def _ending(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Training that returns has come to its planned end; one that raises has not."""
    result = original(*args, **kwargs)
    if _running and _running[0].gate is not None:
        _running[0].gate.finish()
    return result


def _loading_watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Publish when training waits for its data; ranks that get it from another have no loader."""
    loaders = original(*args, **kwargs)
    if _running and loaders[0] is not None:
        _running[0].watch_loader(loaders[0])
    return loaders
