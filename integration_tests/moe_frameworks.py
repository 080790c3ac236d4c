"""Experts of the frameworks in test jobs: catalogues, what faults act on, and DeepSpeed's job.

Importing this loads no framework.
"""

from __future__ import annotations

import importlib
import pathlib
import random
from typing import Any

from scout_core.decision.catalog import build_catalog, exact_observation
from scout_core.decision.catalog_file import CatalogFile, Discovery
from scout_core.decision.incident import Incident
from scout_core.decision.topology import Topology
from scout_core.evidence.catalog_store import write_catalog
from scout_core.evidence.environment import machine
from scout_core.integration.expert_calls import ExpertKernels
from scout_core.integration.expert_facts import environment_of
from scout_core.lab.faults import FaultAt, Magnitude, Surface

UNSEEN = "on a CPU every shape stands for itself"


def write(
    path: pathlib.Path, kernels: ExpertKernels, topology: Topology, rows: tuple[int, ...]
) -> str:
    """Write the catalogue of one framework's experts on this machine, for these row counts."""
    catalog = build_catalog(exact_observation((n,)) for n in rows)
    discovery = Discovery("torch-profiler", len(rows), 3, 0, 0.0, 0.0, {UNSEEN: len(rows)})
    found_in = environment_of(kernels, machine(), topology)
    write_catalog(path, CatalogFile(found_in, discovery, catalog))
    return str(path)


def draw_fault(draw: random.Random, rank: int, rows: int, step: int = 0) -> FaultAt:
    """A persistent corruption of one rank's experts at one row count."""
    return FaultAt(
        "sdc",
        rank,
        step,
        surface=draw.choice([Surface.OUTPUT, Surface.GRADIENT]),
        magnitude=draw.choice([Magnitude.MID_BIT, Magnitude.SIGN]),
        rows=rows,
        seed=draw.randrange(1 << 30),
    )


def experts_of(session: Any) -> list[Any]:
    """What faults at one row count act on; nothing without a session."""
    if session is None:
        return []
    sites = session._checker._framework.sites()
    return [(site.module, site.experts) for site in sites if site.experts is not None]


def shape_named(fault: FaultAt, incidents: list[Incident]) -> bool:
    """Some incident names the rank and its row count."""
    return any(
        i.culprit_ranks == (fault.rank,) and fault.rows in i.evidence.get("rows", ())
        for i in incidents
    )


def deepspeed_in_turn(
    rank: int, layout: Any, options: Any, faults: list[FaultAt], most: int
) -> tuple[list[Incident], list[list[Incident]], str]:
    """Break one rank after the other until its rows are named, at most for so many checks."""
    importlib.import_module("integration_tests.deepspeed_server")  # decides what is compiled
    jobs = importlib.import_module("integration_tests.deepspeed_jobs")
    from scout_core.lab.injection import Target, inject

    engine = jobs.build(layout, jobs.config_of(layout, options.scout, options.run_dir), options)
    session, data = engine.scout, jobs.batches(layout, engine, options.seed)
    target = Target([engine.module], engine.basic_optimizer, experts=experts_of(session))

    def step() -> list[Incident]:
        before = len(session.incidents())
        jobs.step_once(layout, engine, data)
        return list(session.incidents()[before:])

    healthy = [incident for _ in range(most) for incident in step()]
    found = []
    for fault in faults:
        undo = inject(fault, target) if fault.rank == rank else lambda: None
        new: list[Incident] = []
        for _ in range(most):
            new += step()
            if shape_named(fault, new):
                break
        undo()
        found.append(new)
    line = session.coverage().line()
    engine.destroy()
    return healthy, found, line
