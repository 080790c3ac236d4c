"""Attach SCOUT to an engine that has just been built, and let go of it when the engine goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scout_core.errors import ScoutError
from scout_core.evidence.capture import Undo
from scout_core.integration import enable
from scout_core.integration.models import Patterns
from scout_core.integration.session import Session
from scout_core.integration.wrapping import wrap_method
from scout_deepspeed.block import Block
from scout_deepspeed.checkpoints import CheckpointGate
from scout_deepspeed.framework import DeepSpeed
from scout_deepspeed.monitor import report_to
from scout_deepspeed.phases import publish_phases


def attach(engine: Any, block: Block) -> Session:
    """Start a session for this engine; all ranks call it together.

    Args:
        engine: a `DeepSpeedEngine` or `PipelineEngine`, initialised; it gets the session as
            `engine.scout`.

    Raises:
        ScoutError: a bad value, or an engine that SCOUT cannot follow. Nothing has been attached
            then.
    """
    refuse(engine)
    patterns = Patterns(block.layers, block.embedding, block.head)
    framework = DeepSpeed(engine, patterns, block.exchange_timeout_s)
    loader = engine.training_dataloader
    session = enable.attach(framework, block, run_dir=block.run_dir, dataloader=loader)
    engine.scout = session
    for undo in (
        report_to(engine.monitor, engine, framework, session),
        *publish_phases(engine, session),
        *_gate(engine, session, block, framework),
        wrap_method(engine, "destroy", _closing(session)),
    ):
        session.at_close(undo)
    return session


def refuse(engine: Any) -> None:
    """Refuse engines whose work cannot be followed.

    Raises:
        ScoutError: no optimizer, DeepCompile, ZenFlow, or weights that are stored quantised.
    """
    reasons = {
        "the engine has no optimizer, so there are no steps to check": engine.basic_optimizer
        is None,
        "compile.deepcompile rewrites the model around its own collectives": (
            engine._config.compile_config.deepcompile
        ),
        "zero_optimization.zenflow updates parameters outside of step()": bool(engine.zenflow),
        "zero_quantized_nontrainable_weights stores shards that cannot be compared": (
            engine.zero_quantized_nontrainable_weights()
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ScoutError(f'{reason}; set "scout": {{"enabled": false}} or change that')


def _gate(engine: Any, session: Session, block: Block, framework: DeepSpeed) -> list[Undo]:
    """Gate the engine's checkpoints, unless its checkpoint engine finishes saves by itself."""
    if engine.checkpoint_engine is None or engine.checkpoint_engine.is_decoupled():
        session.note("saves_not_gated", why="the checkpoint engine commits by itself")
        return []
    gate = CheckpointGate(engine, session, block)
    return [*gate.install(), framework.on_step_end(gate.commit_released)]


def _closing(session: Session) -> Callable[..., Any]:
    """Close the session before the engine is destroyed: its groups need the process group."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.close()
        return original(*args, **kwargs)

    return around
