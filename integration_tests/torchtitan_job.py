"""One torchtitan job of a test as data: what to run, what to break, what came of it."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
from dataclasses import dataclass, field

from scout_core.decision.incident import Incident
from scout_core.lab.faults import FaultAt


@dataclass(frozen=True)
class Break:
    """A fault in a layer or in a submodule of it; layers are counted on the faulty rank."""

    fault: FaultAt
    part: str = ""


@dataclass(frozen=True)
class Job:
    """Ranks of one machine that run torchtitan's own `main` with these arguments."""

    ranks: int
    argv: tuple[str, ...]
    folder: str
    """Logs and results of the ranks go here."""
    breaks: tuple[Break, ...] = ()
    timeout_s: float = 90.0
    stop_when: str = ""
    """The job is ended when this file holds something: a job that hangs does not end by itself."""


@dataclass
class RankResult:
    """What one rank brings home."""

    losses: list[tuple[int, str, str]] = field(default_factory=list)
    """(step, loss, gradient norm), the floats in hex: compared bit for bit."""
    parameters: str = ""
    """Digest of this rank's parameters at the end."""
    coverage: str = ""
    recipes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    incidents: list[Incident] = field(default_factory=list)
    checks: int = 0
    armed: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """SCOUT's part of the last metrics."""
    loaded: list[str] = field(default_factory=list)
    """SCOUT's modules that this process imported."""
    hooks: int = 0
    """Hooks on modules and optimizers after training."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    codes: list[int]
    """Exit code per rank; negative for a signal."""
    seconds: float
    late: bool


def result_path(folder: str, rank: int) -> pathlib.Path:
    """Where a rank leaves its result."""
    return pathlib.Path(folder) / f"rank-{rank}.pickle"


def read_result(folder: str, rank: int) -> RankResult | None:
    """Return what a rank left, if it came that far."""
    path = result_path(folder, rank)
    if not path.exists():
        return None
    result = pickle.loads(path.read_bytes())
    assert isinstance(result, RankResult)
    return result


STOCK_FAULT = "TORCHTITAN_TEST_FAULT"


def stock_fault(broken: Break) -> dict[str, str]:
    """Return the environment that tells `torchtitan_stock` of a corruption."""
    fault = broken.fault
    return {STOCK_FAULT: json.dumps([fault.rank, fault.step, fault.layer])}


def read_stock_fault() -> Break:
    """Return the corruption that the environment tells of."""
    rank, step, layer = json.loads(os.environ[STOCK_FAULT])
    return Break(FaultAt("sdc", rank, step, layer))
