"""Start a job from the checkpoint that the evidence allows; the same for every way of loading."""

from __future__ import annotations

from collections.abc import Callable

from scout_core.decision.labels import Choice, Failure
from scout_core.errors import ScoutError
from scout_core.integration.gate_service import GateService
from scout_core.integration.saves import Chosen


class NoTrustedCheckpoint(ScoutError):
    """There are checkpoints, but none that the evidence allows to start from."""


def restore(
    service: GateService,
    load: Callable[[Choice], object],
    failure: Failure | str | None = None,
    sweep: Callable[[], bool] | None = None,
    accept_uncertified: bool = False,
) -> Chosen:
    """Choose a checkpoint, load it, and tell the gate that training goes on from there; collective.

    Args:
        load: fills the training state; called with a choice that has a step.
        failure: why the job starts again; None takes $SCOUT_FAILURE, or what the record says.
        sweep: replays the whole catalogue and tells whether it was clean, job-wide; decides
            after a hang or an unknown failure, on the newest state.
        accept_uncertified: a person answers for checkpoints that could not be certified.

    Returns:
        What was chosen; without a step nothing was loaded and the gate was told nothing.
    """
    chosen = service.choose(failure, accept_uncertified=accept_uncertified)
    loaded = None
    if sweep is not None and chosen.failure in (Failure.HANG, Failure.UNKNOWN):
        newest = service.choose(chosen.failure, sweep_clean=True)
        if newest.choice.step is not None and newest.choice != chosen.choice:
            load(newest.choice)
            loaded = newest.choice
            service.swept(sweep())
            chosen = service.choose(Failure.NONE, accept_uncertified=accept_uncertified)
    choice = chosen.choice
    if choice.step is not None:
        if choice != loaded:
            load(choice)
        service.resumed(choice.step, choice.path)
    return chosen


def no_trusted_checkpoint(service: GateService, chosen: Chosen, way_out: str) -> ScoutError:
    """Return the error of a job that has checkpoints and may start from none of them."""
    return NoTrustedCheckpoint(
        f"none of {chosen.num_checkpoints} checkpoints in {service.folder} can be trusted after "
        f"failure={chosen.failure.value!r}: {chosen.choice.why}; look at them with "
        f"`scout ckpt list`, or {way_out}"
    )
