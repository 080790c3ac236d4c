"""Tables of timings (Parquet or CSV): read, diagnose, render.

One row is one operation of one rank in one step. Columns, with the names that are understood:
rank; step; operation (optype, op); duration (seconds); optional start (start_ts), dp_rank, stage,
micro_batch (mb_id), chunk (mc), tokens and host.
"""

from __future__ import annotations

import csv
import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scout_core.decision.imbalance import explain
from scout_core.decision.imbalance_incident import to_incident
from scout_core.decision.incident import Incident
from scout_core.decision.work import Array, Work, Worker, median
from scout_core.errors import ScoutError
from scout_core.report.heatmap import Heat, to_png, to_text

SUFFIXES = (".parquet", ".csv")
NAMES = {
    "rank": ("rank", "global_rank"),
    "step": ("step", "iteration"),
    "operation": ("operation", "optype", "op", "name"),
    "duration": ("duration", "duration_s", "seconds"),
    "start": ("start", "start_ts", "start_s"),
    "replica": ("dp_rank", "replica", "dp"),
    "stage": ("stage", "pp_rank", "pp"),
    "micro_batch": ("micro_batch", "mb_id", "microbatch"),
    "chunk": ("chunk", "mc", "model_chunk"),
    "tokens": ("tokens", "num_tokens", "seq_len"),
    "host": ("host", "hostname"),
}
NEEDED = ("rank", "step", "operation", "duration")

_TRANSFER = re.compile(
    r"send|recv|reduce|gather|broadcast|all.?to.?all|barrier|p2p|comm|nccl|sync|wait", re.I
)
_NEIGHBOUR = re.compile(r"send|recv|receive", re.I)
_PAUSE = re.compile(r"^gc$|garbage", re.I)
_LOADING = re.compile(r"data|load", re.I)
_UPDATE = re.compile(r"optim|clip|scheduler", re.I)

Columns = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


@dataclass(frozen=True)
class Table:
    """A table of timings."""

    work: Work
    hosts: Mapping[int, str]
    """By global rank, where the table has them."""
    ignored_operations: tuple[str, ...]
    """Operations whose duration includes waiting for others; they tell nothing about a rank."""


def diagnose_timings(path: str | pathlib.Path, kappa: float = 5.0) -> list[Incident]:
    """Say which rank computes slowly in a table of timings, or what else makes the job slow.

    Raises:
        ScoutError: no such file, not a table of timings, or no compute operation in it.
    """
    return diagnose(read_timings(path), kappa)


def render(path: str | pathlib.Path, png: str | pathlib.Path | None = None) -> str:
    """Draw who was slow when, for the terminal, and as PNG where a file is named.

    Raises:
        ScoutError: as `read_timings`; or the PNG cannot be written.
    """
    table = read_timings(path)
    drawn = heat(table)
    if png is not None:
        marked = [rank for incident in diagnose(table) for rank in incident.culprit_ranks]
        to_png(drawn, png, marked)
    return to_text(drawn)


def diagnose(table: Table, kappa: float = 5.0) -> list[Incident]:
    """Say which rank computes slowly, or what else makes the job slow."""
    found = explain(table.work, kappa)
    return [to_incident(explanation, table.work, hosts=table.hosts) for explanation in found]


def heat(table: Table) -> Heat:
    """Compute seconds of each rank in each step over those of the median rank of the step."""
    seconds = np.where(np.isfinite(table.work.seconds), table.work.seconds, 0).sum(axis=(2, 3))
    seconds = np.where(seconds > 0, seconds, np.nan)
    ratio = seconds / median(seconds, axis=1)[:, None]
    workers = table.work.workers
    labels = tuple(table.hosts.get(w.rank) or f"(d{w.replica} p{w.stage})" for w in workers)
    return Heat(tuple(w.rank for w in workers), labels, table.work.steps, ratio.T)


def read_timings(path: str | pathlib.Path) -> Table:
    """Read a table; see the module's docstring for its columns.

    Raises:
        ScoutError: no such file, an unknown suffix, a missing column, a value that is not a
            number, or no compute operation.
    """
    place = pathlib.Path(path)
    if place.suffix not in SUFFIXES:
        raise ScoutError(
            f"{place} is no table of timings; known suffixes are {', '.join(SUFFIXES)}"
        )
    if not place.is_file():
        raise ScoutError(f"{place} does not exist; name a table of timings")
    raw = _read_parquet(place) if place.suffix == ".parquet" else _read_csv(place)
    return _table(_named(raw, place), place)


def _read_parquet(path: pathlib.Path) -> dict[str, Sequence[Any]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ScoutError(
            f"{path} needs pyarrow; install scout-training[report], or convert it to CSV"
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.lib.ArrowInvalid, OSError) as error:
        raise ScoutError(f"{path} cannot be read as Parquet: {error}") from None
    return {name: table[name].to_pylist() for name in table.column_names}


def _read_csv(path: pathlib.Path) -> dict[str, Sequence[Any]]:
    with path.open(newline="", encoding="utf-8") as lines:
        try:
            rows = list(csv.DictReader(lines, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ScoutError(f"{path} cannot be read as CSV: {error}") from None
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def _named(raw: Mapping[str, Sequence[Any]], path: pathlib.Path) -> Columns:
    """Give the columns our names and types."""
    columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
    for name, aliases in NAMES.items():
        alias = next((alias for alias in aliases if alias in raw), None)
        if alias is None and name in NEEDED:
            raise ScoutError(
                f"{path} has no column for {name!r} (one of {', '.join(aliases)}); "
                f"its columns are {', '.join(raw) or 'none'}"
            )
        if alias is None:
            continue
        values = raw[alias]
        if name in ("operation", "host"):
            columns[name] = np.array([str(value) for value in values], dtype=object)
        else:
            columns[name] = _numbers(values, alias, path)
    if not len(columns["rank"]):
        raise ScoutError(f"{path} has no rows")
    return columns


def _numbers(values: Sequence[Any], column: str, path: pathlib.Path) -> Array:
    try:
        floats = np.array([np.nan if v in (None, "") else v for v in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ScoutError(f"column {column!r} of {path} must hold numbers: {error}") from None
    return floats


def _table(columns: Columns, path: pathlib.Path) -> Table:
    for name in ("rank", "step"):
        if not np.isfinite(columns[name]).all():
            raise ScoutError(f"column for {name!r} of {path} has rows without a value")
    operations = sorted(set(columns["operation"]))
    compute = _compute_operations(operations)
    if not compute:
        raise ScoutError(
            f"{path} has no compute operation; its operations are {', '.join(operations)}"
        )
    rows = np.flatnonzero(np.isin(columns["operation"], compute))
    workers = _workers(columns, rows)
    steps = tuple(int(step) for step in np.unique(columns["step"][rows]))
    grid = _Grid(columns, workers, steps)
    seconds, names = grid.seconds(rows)
    work = Work(
        workers,
        steps,
        names,
        seconds,
        tokens=grid.tokens(rows, seconds.shape[3]),
        pauses_s=grid.total([name for name in operations if _PAUSE.search(name)]),
        loading_s=grid.total(
            [n for n in operations if _LOADING.search(n) and not _TRANSFER.search(n)]
        ),
    )
    waiting = tuple(name for name in operations if name not in compute and _TRANSFER.search(name))
    hosts = {
        int(columns["rank"][row]): str(columns["host"][row]) for row in rows if "host" in columns
    }
    return Table(work, hosts, waiting)


def _compute_operations(operations: Sequence[str]) -> list[str]:
    """Operations whose duration a rank alone decides."""
    own = [name for name in operations if "compute" in name.lower()]
    other = (_TRANSFER, _PAUSE, _LOADING, _UPDATE)
    return own or [n for n in operations if not any(pattern.search(n) for pattern in other)]


def _workers(columns: Columns, rows: Array) -> tuple[Worker, ...]:
    """One per rank, with its place in the grid.

    Ranks that send and receive differently are in different stages, which tells the first, the
    last and the other stages apart where there is no stage column; such ranks cannot be paired
    with those of other stages, and each is a replica of its own. With a stage column only, the
    order of the ranks says which replica they are.
    """
    ranks, places = np.unique(columns["rank"][rows].astype(np.int64), return_index=True)
    first = dict(zip(ranks.tolist(), rows[places].tolist(), strict=True))
    if "stage" in columns:
        stages = {rank: int(columns["stage"][row]) for rank, row in first.items()}
    else:
        stages = _stages_by_operations(columns, list(first))
    counted: dict[int, int] = defaultdict(int)
    workers: list[Worker] = []
    for rank, row in first.items():
        number = counted[stages[rank]] if "stage" in columns else len(workers)
        if "replica" in columns:
            number = int(columns["replica"][row])
        counted[stages[rank]] += 1
        workers.append(Worker(rank, number, stages[rank]))
    return tuple(workers)


def _stages_by_operations(columns: Columns, ranks: Sequence[int]) -> dict[int, int]:
    """Number the sets of sends and receives that ranks run, in the order of the ranks."""
    operations: dict[int, set[str]] = {rank: set() for rank in ranks}
    every_rank = columns["rank"].astype(np.int64).tolist()
    for rank, name in zip(every_rank, columns["operation"].tolist(), strict=True):
        if rank in operations and _NEIGHBOUR.search(name):
            operations[rank].add(name)
    numbers: dict[frozenset[str], int] = {}
    return {
        rank: numbers.setdefault(frozenset(those), len(numbers))
        for rank, those in operations.items()
    }


@dataclass(frozen=True)
class _Grid:
    """Places rows of the table in arrays."""

    columns: Columns
    workers: tuple[Worker, ...]
    steps: tuple[int, ...]

    def seconds(self, rows: Array) -> tuple[Array, tuple[str, ...]]:
        """(S, W, K, M) durations, and the K operations; each model chunk has its own."""
        names = [self._operation(row) for row in rows]
        operations = tuple(sorted(set(names)))
        batches = self._batches(rows, names)
        shape = (len(self.steps), len(self.workers), len(operations), int(batches.max()) + 1)
        seconds = np.full(shape, np.nan)
        steps, workers = self._places(rows)
        kinds = np.array([operations.index(name) for name in names])
        seconds[steps, workers, kinds, batches] = self.columns["duration"][rows]
        return seconds, operations

    def tokens(self, rows: Array, batches: int) -> Array | None:
        """(S, W, M) tokens, None when the table has none."""
        if "tokens" not in self.columns:
            return None
        names = [self._operation(row) for row in rows]
        tokens = np.full((len(self.steps), len(self.workers), batches), np.nan)
        steps, workers = self._places(rows)
        tokens[steps, workers, self._batches(rows, names)] = self.columns["tokens"][rows]
        return tokens

    def total(self, operations: Sequence[str]) -> Array | None:
        """(S, W) seconds spent in these operations, None when the table has none of them."""
        if not operations:
            return None
        rows = np.flatnonzero(
            np.isin(self.columns["operation"], operations)
            & np.isin(self.columns["step"], self.steps)
            & np.isin(self.columns["rank"], [worker.rank for worker in self.workers])
        )
        total = np.zeros((len(self.steps), len(self.workers)))
        np.add.at(total, self._places(rows), np.nan_to_num(self.columns["duration"][rows]))
        return total

    def _places(self, rows: Array) -> tuple[Array, Array]:
        ranks = np.array([worker.rank for worker in self.workers])
        return (
            np.searchsorted(np.array(self.steps), self.columns["step"][rows]),
            np.searchsorted(ranks, self.columns["rank"][rows]),
        )

    def _operation(self, row: int) -> str:
        name = str(self.columns["operation"][row])
        chunk = int(self.columns["chunk"][row]) if "chunk" in self.columns else 0
        return f"{name} of chunk {chunk}" if chunk > 0 else name

    def _batches(self, rows: Array, names: Sequence[str]) -> Array:
        """(rows,) micro-batch of each row: as given, else by order in time."""
        given = self.columns.get("micro_batch")
        if given is not None and (given[rows] >= 0).all():
            return np.asarray(given[rows].astype(np.int64))
        order = np.arange(len(rows))
        if "start" in self.columns:
            order = np.argsort(self.columns["start"][rows], kind="stable")
        seen: dict[tuple[float, float, str], int] = defaultdict(int)
        batches = np.zeros(len(rows), dtype=np.int64)
        for position in order.tolist():
            row = rows[position]
            key = (self.columns["step"][row], self.columns["rank"][row], names[position])
            batches[position] = seen[key]
            seen[key] += 1
        return batches
