"""What a grouped GEMM executes for given rows per expert: a pure model, equal to the kernel.

The kernel is `lab.grouped_gemm_kernel`; its counters equal this model's, program by program. One
expert projection runs three launches, each computing OUT[e] = A[e] @ B[e] for every expert e:

    phase            output rows    output columns   reduction
    forward          rows[e]        out_features     in_features
    input gradient   rows[e]        in_features      out_features
    weight gradient  in_features    out_features     rows[e]

The output is cut into tiles, numbered expert by expert, then by row block, column block and slice
(fastest). A slice is a part of the reduction that a program of its own computes into a buffer of
its own; the buffers are added afterwards, which is the same work for every shape of a fingerprint
and is not counted. A direct launch has one program per tile. A persistent launch has one program
per streaming multiprocessor (SM), and program p computes the tiles p, p + SMs, p + 2 SMs, ...

The host chooses the schedule from what it knows before the launch, rows per expert, and the choice
is the fingerprint. Roles are the branches of the device code.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from scout_core.decision.catalog import Observation, Shape
from scout_core.decision.dominance import Counts
from scout_core.errors import ScoutError

_Ints = NDArray[np.int64]
Schedule = Literal["auto", "direct", "persistent"]


class Phase(enum.Enum):
    """The launches of one expert projection in a training step."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


class Role(enum.IntEnum):
    """A branch of the device code; the value is its column in the kernel's counters."""

    PROGRAM = 0  # a program has a tile at all: one more SM at work
    RESUME = 1  # a persistent program goes on to a further tile
    ENTER = 2  # a program meets its first tile of an expert and reads the expert's addresses
    INTERIOR = 3  # a tile whose rows and columns all exist: no mask on its store
    ROW_TAIL = 4  # a tile with fewer rows
    COLUMN_TAIL = 5  # a tile with fewer columns
    CORNER = 6  # a tile with fewer of both
    REDUCE = 7  # a full step of the reduction loop: no mask on its loads
    REDUCE_TAIL = 8  # the last, shorter step
    EMPTY = 9  # a tile without any step, which stores zeros: an idle slice, an expert without rows


PATHS = {phase: tuple(f"{phase.value}/{role.name.lower()}" for role in Role) for phase in Phase}
"""Names of the execution paths of each phase, in the order of `Role`."""


class Tile(NamedTuple):
    """Elements that one program works on at a time."""

    rows: int
    columns: int
    reduction: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


_SETTINGS = re.compile(
    r"tile (\d+x\d+x\d+), weight tile (\d+x\d+x\d+), (even|ceil) slices <= (\d+), "
    r"(auto|direct|persistent)"
)
_TILE = Tile(rows=32, columns=128, reduction=64)
_WEIGHT_TILE = Tile(rows=64, columns=64, reduction=32)


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel.

    The arrays are (experts,) and hold the extents of each expert's product.
    """

    phase: Phase
    tile: Tile
    rows: _Ints
    columns: _Ints
    reduction: _Ints
    slices: int
    even: bool  # slices of equal length; else of the length ceil(steps / slices), the last shorter
    persistent: bool
    num_sms: int

    @cached_property
    def tiles(self) -> _Ints:
        """(experts,) tiles of each expert, slices included."""
        blocks = _blocks(self.rows, self.tile.rows) * _blocks(self.columns, self.tile.columns)
        return blocks * self.slices

    @cached_property
    def programs(self) -> int:
        """Programs to launch; 0 when there is nothing to do."""
        tiles = int(self.tiles.sum())
        return min(tiles, self.num_sms) if self.persistent else tiles

    @property
    def fingerprint(self) -> str:
        """The choices of the host for this launch."""
        if not self.programs:
            return f"{self.phase.value} none"
        how = "persistent" if self.persistent else "direct"
        return f"{self.phase.value} {how} {self.tile} slices={self.slices}"

    def counts(self) -> Counts:
        """Return (roles,) executions of each role, all programs together, in closed form."""
        tile, slices, experts = self.tile, self.slices, self.tiles
        full_rows, full_columns = self.rows // tile.rows, self.columns // tile.columns
        row_tail, column_tail = self.rows % tile.rows > 0, self.columns % tile.columns > 0
        tail = self.reduction % tile.reduction > 0
        steps = _blocks(self.reduction, tile.reduction)
        outputs = experts // slices
        by_role = {
            Role.PROGRAM: self.programs,
            Role.RESUME: experts.sum() - self.programs,
            Role.ENTER: np.minimum(experts, self.programs).sum(),
            Role.INTERIOR: (full_rows * full_columns).sum() * slices,
            Role.ROW_TAIL: (row_tail * full_columns).sum() * slices,
            Role.COLUMN_TAIL: (full_rows * column_tail).sum() * slices,
            Role.CORNER: (row_tail & column_tail).sum() * slices,
            Role.REDUCE: (outputs * (steps - tail)).sum(),
            Role.REDUCE_TAIL: (outputs * tail).sum(),
            Role.EMPTY: (outputs * (slices - self._used_slices(steps))).sum(),
        }
        return np.array([by_role[role] for role in Role], dtype=np.int64)

    def program_counts(self) -> Counts:
        """Return (programs, roles): which program does what, tile by tile."""
        counts = np.zeros((self.programs, len(Role)), dtype=np.int64)
        if not self.programs:
            return counts
        number = np.arange(int(self.tiles.sum()))
        program = number % self.programs
        for role, times in self._roles_of_tiles(number, program):
            counts[:, role] = np.bincount(program, weights=times, minlength=self.programs)
        return counts

    def _roles_of_tiles(self, number: _Ints, program: _Ints) -> Iterator[tuple[Role, _Ints]]:
        expert = np.repeat(np.arange(len(self.rows)), self.tiles)
        local = number - (np.cumsum(self.tiles) - self.tiles)[expert]
        block, part = local // self.slices, local % self.slices
        across = _blocks(self.columns, self.tile.columns)[expert]
        row_end = (block // across + 1) * self.tile.rows > self.rows[expert]
        column_end = (block % across + 1) * self.tile.columns > self.columns[expert]
        begin, end = self._steps_of(part, _blocks(self.reduction, self.tile.reduction)[expert])
        masked = (end > begin) & (end * self.tile.reduction > self.reduction[expert])
        seen = np.unique(np.stack([program, expert]), axis=1, return_index=True)[1]
        yield Role.PROGRAM, (number < self.programs).astype(np.int64)
        yield Role.RESUME, (number >= self.programs).astype(np.int64)
        yield Role.ENTER, np.isin(number, seen).astype(np.int64)
        yield Role.INTERIOR, (~row_end & ~column_end).astype(np.int64)
        yield Role.ROW_TAIL, (row_end & ~column_end).astype(np.int64)
        yield Role.COLUMN_TAIL, (~row_end & column_end).astype(np.int64)
        yield Role.CORNER, (row_end & column_end).astype(np.int64)
        yield Role.REDUCE, end - begin - masked
        yield Role.REDUCE_TAIL, masked.astype(np.int64)
        yield Role.EMPTY, (end == begin).astype(np.int64)

    def _steps_of(self, part: _Ints, steps: _Ints) -> tuple[_Ints, _Ints]:
        if self.even:
            return steps * part // self.slices, steps * (part + 1) // self.slices
        length = _blocks(steps, self.slices)
        return np.minimum(part * length, steps), np.minimum((part + 1) * length, steps)

    def _used_slices(self, steps: _Ints) -> _Ints:
        if self.even:
            return np.minimum(steps, self.slices)
        return _blocks(steps, np.maximum(_blocks(steps, self.slices), 1))


@dataclass(frozen=True)
class GroupedGemm:
    """One expert projection on one rank: dimensions, kernel settings, and the host's choices."""

    in_features: int
    out_features: int
    experts: int = 1
    num_sms: int = 108
    tile: Tile = _TILE
    """Tile of forward and input gradient."""
    weight_tile: Tile = _WEIGHT_TILE
    """Tile of the weight gradient, whose reduction runs over the rows."""
    max_slices: int = 16
    """Most parts of the weight gradient's reduction; a power of two."""
    even_slices: bool = True
    schedule: Schedule = "auto"
    """"auto" is direct as long as every tile has an SM of its own."""

    def __post_init__(self) -> None:
        sizes = [self.in_features, self.out_features, self.experts, self.num_sms, self.max_slices]
        if min(*sizes, *self.tile, *self.weight_tile) < 1:
            raise ScoutError(f"every size of {self} must be >= 1")

    @classmethod
    def from_settings(
        cls, in_features: int, out_features: int, experts: int, num_sms: int, settings: str
    ) -> GroupedGemm:
        """Read what `settings` returned, without a later suffix.

        Raises:
            ScoutError: not such a text.
        """
        found = _SETTINGS.match(settings)
        if found is None:
            raise ScoutError(
                f"kernel settings {settings!r} are not those of the schedule model, so it cannot "
                "say what other shapes execute; build the catalogue again"
            )
        tile, weight_tile, slicing, most, schedule = found.groups()
        return cls(
            in_features,
            out_features,
            experts,
            num_sms,
            Tile(*map(int, tile.split("x"))),
            Tile(*map(int, weight_tile.split("x"))),
            int(most),
            slicing == "even",
            cast("Schedule", schedule),
        )

    @property
    def settings(self) -> str:
        """Name everything that can be set, for the environment of a catalogue."""
        slicing = "even" if self.even_slices else "ceil"
        return (
            f"tile {self.tile}, weight tile {self.weight_tile}, {slicing} slices <= "
            f"{self.max_slices}, {self.schedule}"
        )

    def launches(self, shape: Shape) -> tuple[Launch, ...]:
        """Return the three launches for the given rows per expert, in order of `Phase`.

        Raises:
            ScoutError: not one number of rows >= 0 per expert.
        """
        rows = self._checked(shape)
        ins = np.full(self.experts, self.in_features, dtype=np.int64)
        outs = np.full(self.experts, self.out_features, dtype=np.int64)
        return (
            self._launch(Phase.FORWARD, self.tile, (rows, outs, ins), 1),
            self._launch(Phase.INPUT_GRADIENT, self.tile, (rows, ins, outs), 1),
            self._launch(
                Phase.WEIGHT_GRADIENT, self.weight_tile, (ins, outs, rows), self.slices(rows)
            ),
        )

    def slices(self, rows: Sequence[int] | _Ints) -> int:
        """Return in how many parts the weight gradient's reduction is cut.

        The largest power of two for which every tile still has an SM of its own and an expert of
        mean rows still has a step for every slice.
        """
        tile = self.weight_tile
        across = -(-self.in_features // tile.rows) * -(-self.out_features // tile.columns)
        steps = int(np.sum(rows)) // (self.experts * tile.reduction)
        most = min(self.max_slices, self.num_sms // (self.experts * across), steps)
        return 1 << max(most, 1).bit_length() - 1

    def observation(self, shape: Shape, *, per_program: bool = False) -> Observation:
        """Return what the shape executes.

        Args:
            per_program: count every program's roles apart. Then alpha covers beta only if each SM
                that a persistent launch occupies does at least as much: a stronger promise, for
                faults of one SM, at the price of many more representatives.
        """
        launches = self.launches(shape)
        counts: dict[str, int] = {}
        for launch in launches:
            if per_program:
                table = launch.program_counts()
                for program, role in zip(*np.nonzero(table), strict=True):
                    counts[f"{PATHS[launch.phase][role]}@{program}"] = int(table[program, role])
            else:
                counts.update(zip(PATHS[launch.phase], launch.counts().tolist(), strict=True))
        return Observation(shape, "; ".join(each.fingerprint for each in launches), counts)

    def _launch(
        self, phase: Phase, tile: Tile, extents: tuple[_Ints, _Ints, _Ints], slices: int
    ) -> Launch:
        direct = Launch(phase, tile, *extents, slices, self.even_slices, False, self.num_sms)
        fits = direct.programs <= self.num_sms
        if self.schedule == "direct" or (self.schedule == "auto" and fits):
            return direct
        return Launch(phase, tile, *extents, slices, self.even_slices, True, self.num_sms)

    def _checked(self, shape: Shape) -> _Ints:
        rows = np.array([shape] if isinstance(shape, int) else shape, dtype=np.int64)
        if rows.shape != (self.experts,) or (rows < 0).any():
            raise ScoutError(
                f"shape {shape!r} must give a number of rows >= 0 for each of the "
                f"{self.experts} experts of the grouped GEMM"
            )
        return rows


def uniform(experts: int, rows: int) -> Shape:
    """Return the shape in which every expert has the same number of rows."""
    return (rows,) * experts


def _blocks(extent: _Ints, size: _Ints | int) -> _Ints:
    return -(-extent // size)
