"""What a catalogue is bound to: the environment it was found in, and what drift means.

Another driver, library or kernel may choose other kernels for the same shape, and then the
catalogue covers nothing it promises. So a difference is never overlooked: it names its fields, and
the job replays exact shapes or says that experts are not covered.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, NamedTuple

from scout_core.errors import ScoutError

OnDrift = Literal["exact", "not_covered"]

_PLACEHOLDER = re.compile(
    r"[?.*_\s-]*|x+|[<{$].*|tbd|todo|fixme|none|null|nil|nan|n/?a|un(known|defined|set)"
    r"|default|placeholder|example|changeme|dummy|any"
)


@dataclass(frozen=True)
class Environment:
    """Everything that may decide which kernels run a shape, and in what schedule.

    Every field holds a real value: what does not exist is said in words ("no GPU"), never left
    empty, because two unknown values would compare as equal.
    """

    gpu: str
    """Model of the device, or of the processor."""
    num_sms: int
    """Streaming multiprocessors (cores, on a CPU) that the kernels are scheduled on."""
    driver: str
    cuda: str
    torch: str
    nccl: str
    kernel_library: str
    """Who computes the experts: "scout triton", "torch._grouped_mm", "transformer_engine"..."""
    kernel_version: str
    kernel_settings: str
    """Tile sizes, schedule and whatever else is set for the kernels."""
    dtype: str
    in_features: int
    out_features: int
    local_experts: int
    """Experts of one grouped kernel."""
    row_alignment: int
    """Row counts are padded to multiples of this; 1 means not padded."""
    degrees: str
    """Parallel degrees, "d=4,e=2": they decide how experts and features are split."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and _PLACEHOLDER.fullmatch(value.strip().lower()):
                raise ScoutError(
                    f"environment field {field.name}={value!r} is a placeholder; a catalogue is "
                    "bound to real values, so give the value, or say in words what is absent"
                )
            if isinstance(value, int) and value < 1:
                raise ScoutError(f"environment field {field.name}={value} must be >= 1")

    def to_json(self) -> dict[str, str | int]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object], place: str) -> Environment:
        """Read what `to_json` returned.

        Args:
            place: where the values were written, for the error.

        Raises:
            ScoutError: a field is missing, unknown, a placeholder, or of the wrong type.
        """
        types = {field.name: int if field.type == "int" else str for field in fields(cls)}
        for wrong, what in ((types.keys() - values, "lacks"), (values.keys() - types, "adds")):
            if wrong:
                raise ScoutError(
                    f"the environment in {place} {what} {', '.join(sorted(wrong))}; "
                    f"its fields are {', '.join(types)}"
                )
        plain: dict[str, str | int] = {}
        for name, kind in types.items():
            value = values[name]
            if not isinstance(value, str | int) or type(value) is not kind:
                raise ScoutError(f"{name}={value!r} in {place} must be of type {kind.__name__}")
            plain[name] = value
        return cls(**plain)  # type: ignore[arg-type]  # each type was compared above


class Difference(NamedTuple):
    """One field that is not what it was when the catalogue was found."""

    field: str
    stored: str | int
    live: str | int

    def __str__(self) -> str:
        return f"{self.field}: {self.stored!r} in the catalogue, {self.live!r} now"


class Reliance(enum.Enum):
    """What the experts' replay may rely on."""

    CATALOGUE = "catalogue"  # the environment is the one of the discovery
    EXACT = "exact"  # it is not: every shape that training executes is replayed itself
    NOT_COVERED = "not_covered"  # it is not, and experts are not replayed


class Decision(NamedTuple):
    """Whether a catalogue may be used, and the sentence for the log."""

    reliance: Reliance
    differences: tuple[Difference, ...]
    message: str


def differences(stored: Environment, live: Environment) -> tuple[Difference, ...]:
    """Return every field that differs, in the order of the fields."""
    was, now = stored.to_json(), live.to_json()
    return tuple(Difference(name, was[name], now[name]) for name in was if was[name] != now[name])


def rely_on(stored: Environment, live: Environment, on_drift: OnDrift) -> Decision:
    """Decide what a job may do with a catalogue that was found in the environment `stored`."""
    found = differences(stored, live)
    if not found:
        return Decision(Reliance.CATALOGUE, (), "the catalogue was found in this environment")
    named = "; ".join(str(each) for each in found)
    what = {
        "exact": "every shape that training executes is replayed itself",
        "not_covered": "expert replay not covered",
    }[on_drift]
    message = f"{what}: the catalogue belongs to another environment ({named}); rebuild it here"
    return Decision(Reliance(on_drift), found, message)
