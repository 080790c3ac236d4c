"""`--scout` and one `--scout-*` option for each field of SCOUT's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scout_core.config import ScoutConfig
from scout_core.errors import ScoutError

SWITCH = "--scout"
PLACE = "the options --scout-*"


class Option(NamedTuple):
    """One field of the configuration as an option."""

    path: tuple[str, ...]  # of field names: ("hang", "stall_timeout_s")
    field: FieldInfo

    @property
    def dest(self) -> str:
        """Attribute of Megatron's arguments."""
        return "_".join(("scout", *self.path))

    @property
    def flag(self) -> str:
        """What the user types."""
        return f"--{self.dest.replace('_', '-')}"


def options() -> Iterator[Option]:
    """Yield an option for each field, nested models included."""
    yield from _of_model(ScoutConfig, ())


def _of_model(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _of_model(kind, (*above, name))
        else:
            yield Option((*above, name), field)


def add_scout_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options to Megatron's parser, and let megatron.training obey them.

    This is what `extra_args_provider` takes.
    """
    from scout_megatron.training import watch

    watch()
    return add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options; adding them twice changes nothing."""
    if parser.get_default("scout") is not None:
        return parser
    group = parser.add_argument_group("scout", "who is at fault, and which checkpoint to trust")
    group.add_argument(
        SWITCH, action="store_true", help="Compare ranks that do the same work, and name a fault."
    )
    group.add_argument(
        "--scout-run-dir", help="Folder of incidents and events; by default ./scout_runs/<time>."
    )
    group.add_argument(
        "--scout-accept-uncertified",
        action="store_true",
        help="Answer for checkpoints that could not be certified: start from the newest of them.",
    )
    for option in options():
        text = f"{option.field.description} Default: {option.field.default}."
        group.add_argument(option.flag, action=_checked(option), help=text.replace("%", "%%"))
    return parser


def config_of(args: argparse.Namespace) -> ScoutConfig:
    """Collect the options that were given.

    Raises:
        ScoutError: a bad value.
    """
    values: dict[str, Any] = {}
    for option in options():
        value = getattr(args, option.dest, None)
        if value is not None:
            _put(values, option.path, value)
    return ScoutConfig.parse(values, PLACE)


def _checked(option: Option) -> type[argparse.Action]:
    """Make an action that refuses a bad value at once, before anything has been started."""

    class Checked(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            value: Any,
            flag: str | None = None,
        ) -> None:
            values: dict[str, Any] = {}
            _put(values, option.path, value)
            try:
                ScoutConfig.parse(values, f"the option {flag}")
            except ScoutError as error:
                raise SystemExit(f"scout: {error}") from None
            setattr(namespace, self.dest, value)

    return Checked


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *above, name = path
    for part in above:
        values = values.setdefault(part, {})
    values[name] = value
