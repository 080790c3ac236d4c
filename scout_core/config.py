"""The one configuration model: frozen, unknown keys forbidden, unit in the name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scout_core.errors import ScoutError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class HangConfig(_Model):
    """The out-of-band observer."""

    enabled: bool = True
    """Start one observer agent per node."""
    stall_timeout_s: Positive = 30.0
    """Seconds without visible progress in a step before the observer calls a hang."""
    initialize_timeout_s: Positive = 1800.0
    """The same before the first step has ended: construction, compilation."""
    data_timeout_s: Positive | None = None
    """The same while waiting for the data loader; None means `stall_timeout_s`."""
    evaluation_timeout_s: Positive = 1800.0
    """The same inside an evaluation phase."""
    checkpoint_timeout_s: Positive = 1800.0
    """The same inside a save or load."""


class CommunicationConfig(_Model):
    """Timing of communication per process group."""

    probe_interval_steps: Annotated[int, Field(ge=0)] = 50
    """Optimizer steps between two active probes; 0 switches them off."""
    probe_bytes: Count = 1 << 20
    """Payload of one probe collective."""


class WorkloadConfig(_Model):
    """How evenly the work is spread: causes of slowness in which no rank is at fault."""

    interval_steps: Annotated[int, Field(ge=0)] = 200
    """Optimizer steps between two looks, each at the twelve steps before it; 0: never."""


class ExpertsConfig(_Model):
    """Replay of MoE experts, whose row counts change at every step."""

    catalogue: str | None = None
    """File of `scout catalog build`; None replays experts at the rows of sampled calls only."""
    on_drift: Literal["exact", "not_covered"] = "exact"
    """When the catalogue is of another environment: replay each executed shape, or no experts."""
    replays_per_check: Count = 2
    """Representatives and executed shapes that one check replays."""
    lookups_per_step: Count | None = None
    """Different shapes of one step that are looked up in the catalogue; None looks at all."""
    modules: str | None = None
    """Regular expression for the names of expert stages, where no framework names them."""


class CheckpointConfig(_Model):
    """The checkpoint gate."""

    keep_last: Count = 2
    """Checkpoints kept besides the verified one and the candidate."""
    memory_dir: str | None = None
    """Folder in a memory file system for the latest checkpoint; None picks one in /dev/shm."""


class ScoutConfig(_Model):
    """Everything a user may change. All fields have a working default."""

    interval_steps: Count = 20
    """Optimizer steps between two checks (I of the cost model V/(I*N))."""
    layers: str | None = None
    """Regular expression for qualified names of repeated layers; None finds them."""
    embedding: str | None = None
    """Regular expression for the embedding's name; None finds it, "" leaves it out."""
    head: str | None = None
    """Regular expression for the output head's name; None finds it, "" leaves it out."""
    confirm_repeats: Count = 3
    """How often a suspicion is repeated at once before it becomes an incident."""
    timing_repeats: Count = 5
    """Replays of one check whose fastest is its time."""
    kappa: Positive = 5.0
    """Sensitivity of the straggler rule in robust scales; one more at 3 peers."""
    optimizer_slice_elements: Count = 1 << 16
    """Largest number of parameter elements of one optimizer replay."""
    exchange_timeout_s: Positive = 60.0
    """Deadline of SCOUT's own collectives; a late peer disarms SCOUT, not the job."""
    on_error: Literal["disarm", "raise"] = "disarm"
    """What an internal error of SCOUT does: switch SCOUT off job-wide, or raise (tests)."""
    job: str = ""
    """Name of the job in incidents."""
    recovery: str = ""
    """Who acts on incidents: a .toml file of commands, or an entry point of "scout.recovery"."""
    hang: HangConfig = HangConfig()
    """The out-of-band observer."""
    communication: CommunicationConfig = CommunicationConfig()
    """Timing of communication per process group."""
    workload: WorkloadConfig = WorkloadConfig()
    """How evenly the work is spread."""
    experts: ExpertsConfig = ExpertsConfig()
    """Replay of MoE experts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoint gate."""

    @classmethod
    def parse(cls, values: dict[str, Any], place: str) -> Self:
        """Build the configuration from plain values.

        Args:
            values: nested field names and values.
            place: where they were written, for the error ("the TOML table [scout]").

        Raises:
            ScoutError: an unknown key or a bad value; names value, place, rule and way out.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ScoutError(_explain(error, cls, place)) from None


def _explain(error: ValidationError, model: type[BaseModel], place: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        table: Any = model
        for part in first["loc"][:-1]:
            table = table.model_fields[part].annotation
        known = ", ".join(sorted(table.model_fields))
        return f"unknown key {key!r} in {place}; known keys are {known}"
    return f"{key}={first['input']!r} in {place}: {first['msg'].lower()}; see `scout_core.config`"
