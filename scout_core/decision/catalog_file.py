"""A catalogue as one JSON value: environment, cost of its discovery, proof data, checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from scout_core.decision.catalog import EXACT, Catalog, Regime, Shape, build_catalog
from scout_core.decision.environment import Environment
from scout_core.errors import ScoutError

SCHEMA = "scout.catalog-file/1"


@dataclass(frozen=True)
class Discovery:
    """What it cost to find the catalogue: the price of an environment that drifts."""

    source: str
    """The profiler: "model", "triton", "torch-profiler"."""
    shapes: int
    repeats: int
    """Observations of each shape; all were equal."""
    resumed: int
    """Observations taken over from an earlier, interrupted discovery."""
    observe_s: float
    """Seconds spent observing, the earlier part included."""
    build_s: float
    """Seconds to find the representatives."""
    unseen: dict[str, int]
    """Reason -> shapes whose execution could not be seen, so that they are replayed themselves."""

    def __str__(self) -> str:
        return (
            f"{self.shapes} shapes x {self.repeats} observations by {self.source} in "
            f"{self.observe_s:.1f} s, representatives found in {self.build_s:.2f} s"
        )


@dataclass(frozen=True)
class CatalogFile:
    """A catalogue and everything needed to decide whether it may be used."""

    environment: Environment
    discovery: Discovery
    catalog: Catalog

    def to_json(self) -> dict[str, Any]:
        """Return plain values; equal files give equal values."""
        content = {
            "schema": SCHEMA,
            "environment": self.environment.to_json(),
            "discovery": asdict(self.discovery),
            "regimes": [_regime_to_json(regime) for regime in self.catalog.regimes],
        }
        return content | {"checksum": checksum(content)}

    @classmethod
    def from_json(cls, values: Any, place: str) -> CatalogFile:
        """Read what `to_json` returned, and check its checksum and its proof.

        Args:
            place: where the values were read, for errors.

        Raises:
            ScoutError: not a catalogue, changed since it was written, or a representative does not
                cover what the file says it covers.
        """
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise ScoutError(
                f"{place} is not a catalogue of schema {SCHEMA}; `scout catalog build` writes one"
            )
        stored = values.get("checksum")
        content = {name: value for name, value in values.items() if name != "checksum"}
        if stored != checksum(content):
            raise ScoutError(
                f"the checksum of {place} is {stored!r} but its content has {checksum(content)!r}: "
                "the file was changed after it was written; build it again"
            )
        try:
            return cls(
                Environment.from_json(values["environment"], place),
                _discovery(values["discovery"]),
                Catalog(tuple(_regime_from_json(each, place) for each in values["regimes"])),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, ScoutError):
                raise
            raise ScoutError(f"{place} cannot be read: {error!r}; build it again") from error

    def refuse_larger_than_needed(self, place: str) -> None:
        """Find the smallest set again and compare it with the file's.

        Raises:
            ScoutError: they differ.
        """
        found = build_catalog(self.catalog.observations()).representatives
        if found != self.catalog.representatives:
            raise ScoutError(
                f"{place} has {len(self.catalog.representatives)} representatives, but its "
                f"observations give {len(found)} others; build it again"
            )


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def shape_from_json(value: Any) -> Shape:
    """Read a shape: a number of rows, or a list with one for each expert."""
    return value if isinstance(value, int) else tuple(value)


def _regime_to_json(regime: Regime) -> dict[str, Any]:
    if not isinstance(regime.fingerprint, str):
        raise ScoutError(
            f"fingerprint {regime.fingerprint!r} cannot be written to a catalogue file; use a text"
        )
    return {
        "fingerprint": regime.fingerprint,
        "paths": list(regime.paths),
        "shapes": list(regime.shapes),
        "counts": regime.counts.tolist(),
        "representative": regime.representative.tolist(),
    }


def _regime_from_json(values: Mapping[str, Any], place: str) -> Regime:
    shapes = tuple(shape_from_json(shape) for shape in values["shapes"])
    counts = np.array(values["counts"], dtype=np.int64).reshape(len(shapes), len(values["paths"]))
    above = np.array(values["representative"], dtype=np.int64)
    if (above[above] != above).any() or (counts[above] < counts).any():
        raise ScoutError(
            f"in {place} a representative of fingerprint {values['fingerprint']!r} does not "
            "execute what it should cover; build it again"
        )
    return Regime(str(values["fingerprint"]), tuple(values["paths"]), shapes, counts, above)


def _discovery(values: Mapping[str, Any]) -> Discovery:
    return Discovery(**{field.name: values[field.name] for field in fields(Discovery)})


def exact_shapes(catalog: Catalog) -> tuple[Shape, ...]:
    """Return the representatives that stand for themselves because nobody saw their execution."""
    return tuple(
        shape
        for regime in catalog.regimes
        if regime.paths == (EXACT,)
        for shape in regime.representatives
    )
