"""Heat map of who was slow when: rank by step, in the terminal and as PNG."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scout_core.errors import ScoutError

LEVELS = ((1.05, "."), (1.10, "-"), (1.25, "+"), (1.50, "x"), (2.00, "#"))
"""Upper bound of a ratio and its sign; above all of them it is @, and unknown is a blank."""
ABOVE = "@"
UNKNOWN = " "
MOST_ROWS = 64
MOST_COLUMNS = 100
HOTTEST = 2.0  # ratio at which the colours of the PNG end

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Heat:
    """How long each rank took in each step, relative to the median rank of that step."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of the rows."""
    labels: tuple[str, ...]
    """One per rank: where it is in the grid, or its host."""
    steps: tuple[int, ...]
    ratio: Array
    """(ranks, steps); NaN where nothing was timed."""

    def __post_init__(self) -> None:
        assert self.ratio.shape == (len(self.ranks), len(self.steps))
        assert len(self.labels) == len(self.ranks)


def to_text(heat: Heat, width: int = MOST_COLUMNS) -> str:
    """Draw the map with ASCII signs.

    Args:
        width: columns for the steps; more steps than that are averaged in neighbours.

    Of more than 64 ranks, the 64 with the largest mean ratio are shown.
    """
    columns = np.array_split(np.arange(len(heat.steps)), min(width, len(heat.steps)))
    means = np.stack([_mean(heat.ratio[:, column]) for column in columns], axis=1)
    rows = _shown_rows(heat)
    names = [f"rank {heat.ranks[row]} {heat.labels[row]}".rstrip() for row in rows]
    margin = max(len(name) for name in names)
    lines = [
        f"{name.ljust(margin)} |{''.join(_sign(value) for value in means[row])}|"
        for name, row in zip(names, rows, strict=True)
    ]
    scale = "  ".join(f"{sign} < {bound:.2f}" for bound, sign in LEVELS)
    head = f"time over the median rank's, steps {heat.steps[0]} to {heat.steps[-1]}"
    left_out = len(heat.ranks) - len(rows)
    tail = [f"{left_out} ranks with smaller ratios are not shown"] if left_out else []
    return "\n".join([head, *lines, f"{scale}  {ABOVE} above", *tail])


def to_png(heat: Heat, path: str | pathlib.Path, marked: Sequence[int] = ()) -> None:
    """Write the map as PNG; the global ranks in `marked` get an arrow.

    Raises:
        ScoutError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ScoutError(
            f"{path} needs matplotlib; install scout-training[report], or use the terminal's map"
        ) from None
    figure = Figure(figsize=(9, 1.5 + min(len(heat.ranks), 100) * 0.16), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        heat.ratio, aspect="auto", interpolation="nearest", cmap="inferno", vmin=0.9, vmax=HOTTEST
    )
    figure.colorbar(image, label="time over the median rank's", extend="both")
    axes.set_xlabel("timed step")
    axes.set_ylabel("rank")
    _label_ticks(axes, heat, marked)
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise ScoutError(f"heat map {path} cannot be written: {error}") from None


def _label_ticks(axes: Any, heat: Heat, marked: Sequence[int]) -> None:
    every = max(1, len(heat.ranks) // 32)
    rows = [i for i, rank in enumerate(heat.ranks) if i % every == 0 or rank in marked]
    names = [f"{heat.ranks[i]} {heat.labels[i]}".rstrip() for i in rows]
    names = [
        f"> {name}" if heat.ranks[i] in marked else name
        for i, name in zip(rows, names, strict=True)
    ]
    axes.set_yticks(rows, names, fontsize=7)
    stride = max(1, len(heat.steps) // 10)
    axes.set_xticks(range(0, len(heat.steps), stride), heat.steps[::stride], fontsize=7)


def _shown_rows(heat: Heat) -> list[int]:
    mean = np.nan_to_num(_mean(heat.ratio))
    hottest = np.argsort(-mean, kind="stable")[:MOST_ROWS]
    return sorted(int(row) for row in hottest)


def _mean(values: Array) -> Array:
    """(ranks,) mean over columns of what is known; NaN where nothing is."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0).sum(axis=1)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))


def _sign(ratio: float) -> str:
    if not np.isfinite(ratio):
        return UNKNOWN
    return next((sign for bound, sign in LEVELS if ratio < bound), ABOVE)
