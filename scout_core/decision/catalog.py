"""The execution-path catalogue of MoE experts: few shapes that stand for all.

Routing gives every expert another number of rows at every step, so thousands of shapes are
admissible. Shape alpha covers shape beta when both have the same fingerprint F (kernels and
schedule) and c(alpha) >= c(beta) in every execution path: whatever persistent hardware fault a
replay of beta would show, a replay of alpha shows. A larger total does not count.

Where the observations come from: `decision.schedule` computes them, profilers measure them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scout_core.decision.dominance import Counts, Indices, minimum_cover
from scout_core.errors import ScoutError

Shape = int | tuple[int, ...]
"""Rows of one expert, or of each expert of a grouped kernel."""

MIN_REPEATS = 3
"""Observations of each shape that a discovery needs: two that differ cannot say which is usual."""
EXACT = "exact"
"""Path and beginning of the fingerprint of shapes that are replayed themselves."""
_MAX_NAMED = 5


class Observation(NamedTuple):
    """What one execution of a shape did."""

    shape: Shape
    fingerprint: Hashable
    """F: kernels, tile sizes and schedule. Paths of different fingerprints are never compared."""
    path_counts: Sequence[int] | Mapping[str, int]
    """c: executions of each path, >= 0; by position, or by name (a missing name is 0)."""


@dataclass(frozen=True, eq=False)
class Regime:
    """The shapes of one fingerprint, and which representative covers which: the proof data.

    Each shape lies below its representative in every path, and a representative is its own.
    """

    fingerprint: Hashable
    paths: tuple[str, ...]
    shapes: tuple[Shape, ...]
    counts: Counts  # (shapes, paths)
    representative: Indices  # (shapes,) position in `shapes`

    def __post_init__(self) -> None:
        above = self.representative
        assert self.counts.shape == (len(self.shapes), len(self.paths))
        assert (above[above] == above).all()
        assert (self.counts[above] >= self.counts).all()

    @cached_property
    def representatives(self) -> tuple[Shape, ...]:
        """Shapes to replay, ascending."""
        return tuple(self.shapes[i] for i in self._positions)

    @cached_property
    def _positions(self) -> Indices:
        return np.unique(self.representative)

    def covering(self, path_counts: Sequence[int] | Mapping[str, int]) -> Shape | None:
        """Return the first representative that executes every path at least as often."""
        counts = _vector(path_counts, self.paths)
        if counts is None:
            return None
        above = (self.counts[self._positions] >= counts).all(axis=1)
        return self.representatives[int(np.argmax(above))] if above.any() else None

    def covered_by(self, representative: Shape) -> tuple[Shape, ...]:
        """Return C(representative): every shape below it, also those that others cover too."""
        counts = self.counts[self.shapes.index(representative)]
        below = (self.counts <= counts).all(axis=1)
        return tuple(self.shapes[i] for i in np.flatnonzero(below))


@dataclass(frozen=True, eq=False)
class Catalog:
    """A smallest set of shapes whose covers together are all admissible shapes."""

    regimes: tuple[Regime, ...]
    """One per fingerprint, by smallest shape."""

    @cached_property
    def representatives(self) -> tuple[Shape, ...]:
        """The shapes to rotate through, ascending."""
        return tuple(sorted((r for each in self.regimes for r in each.representatives), key=order))

    @cached_property
    def _home(self) -> dict[Shape, tuple[Regime, int]]:
        return {s: (regime, i) for regime in self.regimes for i, s in enumerate(regime.shapes)}

    @cached_property
    def _regime_of(self) -> dict[Hashable, Regime]:
        return {regime.fingerprint: regime for regime in self.regimes}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All admissible shapes, ascending."""
        return tuple(sorted(self._home, key=order))

    def covers(self, shape: Shape) -> bool:
        """Tell whether a representative covers the shape; nobody answers for a shape not observed.

        `covering` answers for other shapes, when what they execute is known.
        """
        return shape in self._home

    def representative_of(self, shape: Shape) -> Shape:
        """Return the representative that covers an admissible shape.

        Raises:
            ScoutError: the shape is not admissible.
        """
        regime, i = self._located(shape)
        return regime.shapes[int(regime.representative[i])]

    def covered_by(self, representative: Shape) -> tuple[Shape, ...]:
        """Return C(representative), ascending; covers of different representatives overlap.

        Raises:
            ScoutError: the shape is not admissible.
        """
        return self._located(representative)[0].covered_by(representative)

    def covering(self, observation: Observation) -> Shape | None:
        """Return a representative that covers what was observed, or None."""
        regime = self._regime_of.get(observation.fingerprint)
        return regime.covering(observation.path_counts) if regime else None

    @property
    def reduction(self) -> float:
        """Share of the admissible shapes that need no replay, 0 to 1."""
        return 1 - len(self.representatives) / len(self._home)

    @property
    def path_executions(self) -> int:
        """Executions of all paths, summed over all admissible shapes."""
        return sum(int(regime.counts.sum()) for regime in self.regimes)

    def observations(self) -> tuple[Observation, ...]:
        """Return what the catalogue was built from, one observation per shape, ascending."""
        return tuple(
            Observation(shape, regime.fingerprint, tuple(regime.counts[i].tolist()))
            for shape in self.shapes
            for regime, i in [self._home[shape]]
        )

    def _located(self, shape: Shape) -> tuple[Regime, int]:
        if shape not in self._home:
            raise ScoutError(
                f"shape {name_of(shape)} is not in the catalogue of {len(self._home)} shapes; "
                "build it again with this shape among the admissible ones"
            )
        return self._home[shape]


def build_catalog(
    observations: Iterable[Observation],
    *,
    requested: Iterable[Shape] = (),
    repeats: int = 1,
) -> Catalog:
    """Find the smallest set of representatives; `minimum_cover` holds the proof.

    Shapes that execute the same are decided for the largest, so the result does not depend on the
    order of the observations.

    Args:
        requested: shapes that must be among the observed ones.
        repeats: equal observations that each shape needs at least. A discovery asks for
            `MIN_REPEATS`; 1 suits observations that are computed.

    Raises:
        ScoutError: observations of one shape differ; a requested shape is missing; a shape was
            observed too rarely; counts are negative, not integers, or of different lengths.
    """
    seen: dict[Shape, Observation] = {}
    times: Counter[Shape] = Counter()
    for observation in observations:
        shape = _checked_shape(observation.shape)
        times[shape] += 1
        _refuse_conflict(seen.setdefault(shape, observation._replace(shape=shape)), observation)
    _refuse_gaps(times, [_checked_shape(shape) for shape in requested], repeats)
    groups: dict[Hashable, list[Observation]] = {}
    for shape in sorted(seen, key=order):
        groups.setdefault(seen[shape].fingerprint, []).append(seen[shape])
    return Catalog(tuple(_regime(fingerprint, group) for fingerprint, group in groups.items()))


def exact_observation(shape: Shape) -> Observation:
    """Return the observation of a shape whose execution cannot be seen: it covers only itself."""
    return Observation(shape, f"{EXACT} {shape!r}", {EXACT: 1})


def order(shape: Shape) -> tuple[int, ...]:
    """Sort key of shapes: number of experts, then rows in all, then rows one by one."""
    rows = (shape,) if isinstance(shape, int) else shape
    return (len(rows), sum(rows), *rows)


def name_of(shape: Shape) -> str:
    """Return the shape for people: "128", "16 x 128" when uniform, else "[3, 0, 7]"."""
    if isinstance(shape, int) or len(shape) == 1:
        return str(shape if isinstance(shape, int) else shape[0])
    return f"{len(shape)} x {shape[0]}" if len(set(shape)) == 1 else str(list(shape))


def _regime(fingerprint: Hashable, group: list[Observation]) -> Regime:
    paths = _paths(group)
    rows = [_vector(each.path_counts, paths) for each in group]
    for row, each in zip(rows, group, strict=True):
        if row is None:
            raise ScoutError(
                f"shape {name_of(each.shape)} has {len(each.path_counts)} path counts and shape "
                f"{name_of(group[0].shape)} of the same fingerprint has {len(paths)}; count the "
                "same paths, all by name or all by position, for every shape of a fingerprint"
            )
    counts = np.array(rows)
    if counts.dtype.kind not in "iu" or not counts.size or counts.min() < 0:
        raise ScoutError(
            f"path counts of fingerprint {fingerprint!r} must be integers >= 0, at least one per "
            f"shape; got {group[0].path_counts!r} for shape {name_of(group[0].shape)} and the like"
        )
    counts = counts.astype(np.int64)
    cover = minimum_cover(counts)
    shapes = tuple(each.shape for each in group)
    return Regime(fingerprint, paths, shapes, counts, cover.representative)


def _paths(group: list[Observation]) -> tuple[str, ...]:
    if isinstance(group[0].path_counts, Mapping):
        named = (o.path_counts for o in group if isinstance(o.path_counts, Mapping))
        return tuple(sorted({path for counts in named for path in counts}))
    return tuple(str(i) for i in range(len(group[0].path_counts)))


def _vector(
    counts: Sequence[int] | Mapping[str, int], paths: tuple[str, ...]
) -> Sequence[int] | None:
    """Return the counts in the order of `paths`, or None when they do not fit."""
    if isinstance(counts, Mapping):
        known = set(paths)
        if any(value for path, value in counts.items() if path not in known):
            return None
        return [counts.get(path, 0) for path in paths]
    return counts if len(counts) == len(paths) else None


def _refuse_conflict(first: Observation, other: Observation) -> None:
    if first.fingerprint != other.fingerprint:
        what = f"fingerprints {first.fingerprint!r} and {other.fingerprint!r}"
    elif _plain(first.path_counts) != _plain(other.path_counts):
        what = f"path counts {_plain(first.path_counts)} and {_plain(other.path_counts)}"
    else:
        return
    raise ScoutError(
        f"shape {name_of(first.shape)} was observed with {what}; a catalogue needs a kernel choice "
        "that depends on the shape alone: switch autotuning off, or replay exact shapes"
    )


def _plain(counts: Sequence[int] | Mapping[str, int]) -> list[int] | dict[str, int]:
    if isinstance(counts, Mapping):
        return {path: value for path, value in sorted(counts.items()) if value}
    return list(counts)


def _refuse_gaps(times: Counter[Shape], requested: list[Shape], repeats: int) -> None:
    missing = [shape for shape in requested if shape not in times]
    if missing:
        raise ScoutError(
            f"{len(missing)} of {len(requested)} requested shapes were not observed: "
            f"{_some(missing)}; observe them, or request fewer"
        )
    if not times:
        raise ScoutError("a catalogue needs at least one observation; none was given")
    rare = [shape for shape in sorted(times, key=order) if times[shape] < repeats]
    if rare:
        raise ScoutError(
            f"{len(rare)} shapes were observed less than {repeats} times: {_some(rare)}; "
            f"repeats={repeats} equal observations of each shape are needed"
        )


def _some(shapes: Sequence[Shape]) -> str:
    more = len(shapes) - _MAX_NAMED
    named = ", ".join(name_of(shape) for shape in shapes[:_MAX_NAMED])
    return f"{named} and {more} more" if more > 0 else named


def _checked_shape(shape: Shape) -> Shape:
    """Return the shape of plain integers: row counts also come as numpy integers or lists."""
    rows = [shape] if isinstance(shape, int | np.integer) else list(shape)
    good = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in rows)
    if not good or not rows or min(rows) < 0:
        raise ScoutError(
            f"shape {shape!r} must be a number of rows >= 0, or one such number per expert"
        )
    return int(rows[0]) if isinstance(shape, int | np.integer) else tuple(map(int, rows))
