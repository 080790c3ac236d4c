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


Scout: type[Any] = dataclass_of(
    ScoutConfig,
    [
        ("enable", Annotated[bool, tyro.conf.arg(help="Attach SCOUT to this job.")], False),
        (
            "run_dir",
            Annotated[str, tyro.conf.arg(help="Folder of incidents and events; '' picks one.")],
            "",
        ),
    ],
)
"""What `[scout]` holds: `enable`, `run_dir`, and the fields of `ScoutConfig`."""


def config_of(settings: Any) -> ScoutConfig:
    """Check the values.

    Args:
        settings: an instance of `Scout`.

    Raises:
        ScoutError: a value that is not allowed.
    """
    values = dataclasses.asdict(settings)
    own = {name: value for name, value in values.items() if name in ScoutConfig.model_fields}
    return ScoutConfig.parse(own, PLACE)
