"""SCOUT's configuration as the dataclasses that torchtitan's TOML files and command line know.

`scout_core.config.ScoutConfig` stays the one place where fields, defaults and rules are written.
The dataclasses are derived from it, so every field is in the TOML table `[scout]` and on the
command line as `--scout.*`, with its help text.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro
from pydantic import BaseModel

from scout_core.config import ScoutConfig

PLACE = "the TOML table [scout] or the options --scout.*"


def dataclass_of(model: type[BaseModel], extra: list[tuple[str, Any, Any]]) -> type[Any]:
    """Return a dataclass with the fields of a pydantic model, nested models included.

    Args:
        extra: (name, type, default) of fields that come first.
    """
    fields: list[tuple[str, Any, Any]] = [
        (name, kind, dataclasses.field(default=default)) for name, kind, default in extra
    ]
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested = dataclass_of(kind, [])
            fields.append((name, nested, dataclasses.field(default_factory=nested)))
        else:
            text = tyro.conf.arg(help=info.description)
            fields.append((name, Annotated[kind, text], dataclasses.field(default=info.default)))
    return dataclasses.make_dataclass(model.__name__, fields)


OWN = {
    "enable": (bool, False, "Attach SCOUT to this job."),
    "run_dir": (str, "", "Folder of incidents and events; empty: <job.dump_folder>/scout/<time>."),
    "accept_uncertified": (
        bool,
        False,
        "After a corruption, start from a checkpoint that passed two clean cycles although some "
        "state has no replica to be compared with (every layout without dp_replicate).",
    ),
}
"""Fields that only this adapter has: type, default, help."""

Scout: type[Any] = dataclass_of(
    ScoutConfig,
    [
        (name, Annotated[kind, tyro.conf.arg(help=text)], default)
        for name, (kind, default, text) in OWN.items()
    ],
)
"""What `[scout]` holds: the fields of `OWN` and those of `ScoutConfig`."""


def config_of(settings: Any) -> ScoutConfig:
    """Check the values.

    Args:
        settings: an instance of `Scout`.

    Raises:
        ScoutError: a value that is not allowed.
    """
    values = dataclasses.asdict(settings)
    shared = {name: value for name, value in values.items() if name not in OWN}
    return ScoutConfig.parse(shared, PLACE)
