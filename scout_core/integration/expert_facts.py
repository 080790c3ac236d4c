"""What the ranks of a job tell each other of their experts at the start, and what follows.

A catalogue is used only when every rank finds it belongs to the environment it runs in; otherwise
all ranks fall back together, and the fields that differ are named.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scout_core.config import ExpertsConfig
from scout_core.decision.catalog import Catalog, exact_observation
from scout_core.decision.catalog_file import CatalogFile
from scout_core.decision.environment import Environment, Reliance, rely_on
from scout_core.decision.expert_replay import ExpertReplays, Launches
from scout_core.decision.path_coverage import Observe
from scout_core.decision.schedule import GroupedGemm
from scout_core.decision.topology import AXES, Topology
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import read_catalog
from scout_core.evidence.environment import OWN_KERNEL, machine
from scout_core.evidence.exchange import Exchange
from scout_core.integration.expert_calls import ExpertKernels
from scout_core.integration.framework import Framework
from scout_core.integration.job_facts import JobFacts

SAMPLED_GAP = (
    "row counts that no sampled call had; build a catalogue with `scout catalog build` and name it "
    "in experts.catalogue"
)


@dataclass(frozen=True)
class ExpertClass:
    """How one class of expert stages is replayed; equal on all ranks, but for the accounting."""

    relies_on: str
    """For people: on what, and why."""
    covered: bool = True
    """False: not replayed at all."""
    replays: ExpertReplays | None = None
    """None: at the rows of sampled calls."""
    gap: str = ""
    """See `session_coverage.ExpertCoverage`."""


def learn(
    framework: Framework, config: ExpertsConfig, topology: Topology, exchange: Exchange
) -> dict[str, ExpertClass]:
    """Decide by path class how expert stages are replayed; collective.

    Raises:
        ScoutError: some rank cannot read the catalogue or its environment, or reads another one;
            on all ranks, with the first rank's reason.
    """
    file, error = _read(config)
    mine: dict[str, Any] = {"error": error, "checksum": file.to_json()["checksum"] if file else ""}
    mine["classes"] = _local_classes(framework)
    mine["machine"] = {}
    if file is not None and not error:
        mine["machine"], mine["error"] = _machine()
    everyone = tuple(range(exchange.world_size))
    told = [json.loads(p) for p in exchange.all_gather(json.dumps(mine).encode(), everyone)]
    _refuse(told)
    classes: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank, each in enumerate(told):
        for name, fields in each["classes"].items():
            classes.setdefault(name, []).append((rank, fields))
    if file is not None and not classes:
        raise ScoutError(
            f"experts.catalogue={config.catalogue!r} is set, but this job has no expert stage "
            "whose calls can be read; remove it, or name the stages in experts.modules"
        )
    machines = [each["machine"] for each in told]
    return {
        name: _decide(name, config, file, topology, _Told(by_rank, machines))
        for name, by_rank in classes.items()
    }


def without_uncovered(facts: JobFacts, classes: Mapping[str, ExpertClass]) -> JobFacts:
    """Leave out the classes that are not replayed, and say so."""
    for name, each in classes.items():
        if not each.covered:
            recipes = facts.rotation.without(name)
            gaps = (*facts.not_covered, f"{name}: {each.relies_on}")
            facts = dataclasses.replace(facts, rotation=recipes, not_covered=gaps)
    return facts


@dataclass(frozen=True)
class _Told:
    by_rank: list[tuple[int, dict[str, Any]]]  # ranks that have the class, and what it is there
    machines: list[dict[str, Any]]  # of every rank

    @property
    def kernels(self) -> ExpertKernels:
        return ExpertKernels(**self.by_rank[0][1]["kernels"])

    @property
    def rows_vary(self) -> bool:
        return any(fields["rows_vary"] for _, fields in self.by_rank)


def _decide(
    name: str, config: ExpertsConfig, file: CatalogFile | None, topology: Topology, told: _Told
) -> ExpertClass:
    kernels = told.kernels
    if file is None:
        gap = SAMPLED_GAP if told.rows_vary else ""
        return ExpertClass("replayed at the rows of sampled calls, without a catalogue", gap=gap)
    odd: dict[str, list[int]] = {}
    reliance = Reliance.CATALOGUE
    for rank, fields in told.by_rank:
        live = environment_of(ExpertKernels(**fields["kernels"]), told.machines[rank], topology)
        decision = rely_on(file.environment, live, config.on_drift)
        if decision.reliance is not Reliance.CATALOGUE:
            reliance = decision.reliance
            odd.setdefault(decision.message, []).append(rank)
    if odd:
        message = "; ".join(f"ranks {ranks}: {why}" for why, ranks in odd.items())
        if reliance is Reliance.NOT_COVERED:
            return ExpertClass(message, covered=False)
        return ExpertClass(message, replays=_replays(name, config, kernels, None))
    catalog = file.catalog
    _refuse_rows(catalog, kernels, str(config.catalogue))
    message = f"{len(catalog.representatives)} representatives of {len(catalog.shapes)} shapes"
    observe = _observe_of(file.environment)
    return ExpertClass(message, replays=_replays(name, config, kernels, catalog, observe))


def environment_of(
    kernels: ExpertKernels, machine_fields: Mapping[str, Any], topology: Topology
) -> Environment:
    """Return the environment of one class of expert stages on one rank."""
    return Environment(
        **machine_fields,
        kernel_library=kernels.library,
        kernel_version=kernels.version,
        kernel_settings=kernels.settings,
        dtype=kernels.dtype,
        in_features=kernels.in_features,
        out_features=kernels.out_features,
        local_experts=kernels.num_experts if kernels.grouped else 1,
        row_alignment=kernels.row_alignment,
        degrees=degrees_of(topology),
    )


def degrees_of(topology: Topology) -> str:
    """Name the parallel degrees of the expert layout: "d=4,e=2", or "d=1" for a single rank."""
    sizes = {axis: 1 + max(place[i] for place in topology.expert) for i, axis in enumerate(AXES)}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "d=1"


def _replays(
    name: str,
    config: ExpertsConfig,
    kernels: ExpertKernels,
    catalog: Catalog | None,
    observe: Observe = exact_observation,
) -> ExpertReplays:
    plain = catalog is not None and isinstance(catalog.shapes[0], int)
    return ExpertReplays(
        name,
        Launches(kernels.num_experts, kernels.grouped, plain),
        catalog,
        observe,
        slots=config.replays_per_check,
        lookups_per_step=config.lookups_per_step,
    )


def _observe_of(found_in: Environment) -> Observe:
    """Say what shapes execute that the catalogue does not hold, where that can be computed."""
    if found_in.kernel_library != OWN_KERNEL:
        return exact_observation
    gemm = GroupedGemm.from_settings(
        found_in.in_features,
        found_in.out_features,
        found_in.local_experts,
        found_in.num_sms,
        found_in.kernel_settings,
    )
    per_program = found_in.kernel_settings != gemm.settings
    return lambda shape: gemm.observation(shape, per_program=per_program)


def _local_classes(framework: Framework) -> dict[str, Any]:
    return {
        site.path_class: {
            "kernels": dataclasses.asdict(site.experts.kernels),
            "rows_vary": site.experts.rows_vary,
        }
        for site in framework.sites()
        if site.experts is not None
    }


def _read(config: ExpertsConfig) -> tuple[CatalogFile | None, str]:
    """Read the catalogue; an error is told to all ranks before it is raised."""
    if config.catalogue is None:
        return None, ""
    try:
        return read_catalog(config.catalogue), ""
    except ScoutError as error:
        return None, str(error)


def _machine() -> tuple[dict[str, Any], str]:
    try:
        return machine(), ""
    except ScoutError as error:
        return {}, str(error)


def _refuse(told: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        if each["error"]:
            raise ScoutError(f"rank {rank}: {each['error']}")
    checksums = sorted({each["checksum"] for each in told})
    if len(checksums) > 1:
        raise ScoutError(
            f"ranks read different catalogues from experts.catalogue (checksums {checksums}); "
            "give all of them the same file"
        )


def _refuse_rows(catalog: Catalog, kernels: ExpertKernels, path: str) -> None:
    for shape in catalog.representatives:
        rows = (shape,) if isinstance(shape, int) else shape
        if any(n % kernels.row_alignment for n in rows):
            raise ScoutError(
                f"the catalogue {path} has representative {shape}, but rows of these experts are "
                f"multiples of {kernels.row_alignment}; build it with --rows FIRST:LAST:"
                f"{kernels.row_alignment}"
            )
