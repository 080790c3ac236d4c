"""A catalogue is used by all ranks or by none: drift anywhere names its fields and falls back."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from scout_core.config import ExpertsConfig
from scout_core.decision.catalog import build_catalog, exact_observation
from scout_core.decision.catalog_file import CatalogFile, Discovery
from scout_core.decision.environment import Environment
from scout_core.decision.topology import Topology
from scout_core.errors import ScoutError
from scout_core.evidence.catalog_store import write_catalog
from scout_core.evidence.environment import OWN_KERNEL, machine
from scout_core.evidence.exchange import LocalExchange, run_threads
from scout_core.integration.expert_calls import ExpertKernels, PackedCalls
from scout_core.integration.expert_facts import ExpertClass, degrees_of, environment_of, learn
from scout_core.integration.framework import Site

NAME = "expert:Stage#1"
RANKS = 3
TOPOLOGY = Topology.from_degrees(d=RANKS)
KERNELS = ExpertKernels("kernels", "1", "tiles", "float32", 16, 32, num_experts=2, row_alignment=8)


class Stage(nn.Module):
    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return tokens


class Experts:
    """The one method of a Framework that is asked here."""

    def __init__(self, kernels: ExpertKernels | None) -> None:
        self._kernels = kernels

    def sites(self) -> list[Site]:
        if self._kernels is None:
            return []
        stage = Stage()
        calls = PackedCalls(stage, self._kernels)
        return [Site("experts", stage, "expert", NAME, "expert", experts=calls)]


def file_of(environment: Environment, rows: tuple[int, ...] = (8, 16)) -> CatalogFile:
    discovery = Discovery("model", len(rows), 3, 0, 0.0, 0.0, {})
    return CatalogFile(environment, discovery, build_catalog(exact_observation((n,)) for n in rows))


@pytest.fixture
def here() -> Environment:
    return environment_of(KERNELS, machine(), TOPOLOGY)


@pytest.fixture
def path(tmp_path: pathlib.Path, here: Environment) -> str:
    file = tmp_path / "experts.json"
    write_catalog(file, file_of(here))
    return str(file)


def learned(kernels: list[ExpertKernels | None], *configs: ExpertsConfig) -> list[ExpertClass]:
    """What each rank learns; the last configuration holds for the ranks that are left."""

    def body(exchange: LocalExchange) -> Any:
        config = configs[min(exchange.rank, len(configs) - 1)]
        return learn(Experts(kernels[exchange.rank]), config, TOPOLOGY, exchange)  # type: ignore[arg-type]

    return [classes[NAME] for classes in run_threads(len(kernels), body)]


def test_in_its_own_environment_a_catalogue_is_used_by_all_ranks(path: str) -> None:
    for each in learned([KERNELS] * RANKS, ExpertsConfig(catalogue=path)):
        assert each.covered
        assert each.relies_on == "2 representatives of 2 shapes"
        assert each.replays is not None
        assert each.replays.recipes == (
            f"{NAME} 8 rows",
            f"{NAME} 16 rows",
            f"{NAME} executed rows",
        )


def test_a_rank_without_experts_knows_the_catalogue_too(path: str) -> None:
    found = learned([KERNELS, None, KERNELS], ExpertsConfig(catalogue=path))
    assert found[1].replays is not None
    assert found[1].replays.recipes == found[0].replays.recipes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "2"), ("dtype", "bfloat16"), ("in_features", 17), ("row_alignment", 4)],
)
def test_drift_on_one_rank_names_it_and_its_field_on_all(path: str, field: str, value: Any) -> None:
    odd = dataclasses.replace(KERNELS, **{field: value})
    found = learned([KERNELS, KERNELS, odd], ExpertsConfig(catalogue=path))
    for each in found:
        assert "ranks [2]" in each.relies_on
        assert field.replace("version", "kernel_version") in each.relies_on
        assert each.replays is not None
        assert each.replays.recipes == (f"{NAME} executed rows",)


@pytest.mark.parametrize("field", ["gpu", "num_sms", "driver", "torch", "degrees"])
def test_every_part_of_the_machine_counts(
    tmp_path: pathlib.Path, here: Environment, field: str
) -> None:
    other = {"num_sms": here.num_sms + 1}.get(field, "something else")
    file = tmp_path / "other.json"
    write_catalog(file, file_of(dataclasses.replace(here, **{field: other})))  # type: ignore[arg-type]
    config = ExpertsConfig(catalogue=str(file), on_drift="not_covered")
    for each in learned([KERNELS] * RANKS, config):
        assert not each.covered
        assert field in each.relies_on


def test_without_a_catalogue_rows_that_vary_are_a_gap(path: str) -> None:
    (each,) = learned([KERNELS], ExpertsConfig())
    assert each.replays is None
    assert "scout catalog build" in each.gap


def test_a_catalogue_that_one_rank_cannot_read_stops_all_of_them(path: str) -> None:
    with pytest.raises(ScoutError, match="rank 1: a catalogue cannot be read"):
        learned([KERNELS] * RANKS, ExpertsConfig(catalogue=path), ExpertsConfig(catalogue="/no"))


def test_ranks_with_other_catalogues_are_refused(
    path: str, tmp_path: pathlib.Path, here: Environment
) -> None:
    file = tmp_path / "other.json"
    write_catalog(file, file_of(here, (8, 24)))
    other = ExpertsConfig(catalogue=str(file))
    with pytest.raises(ScoutError, match="different catalogues"):
        learned([KERNELS] * 2, ExpertsConfig(catalogue=path), other)


def test_representatives_that_the_padding_never_makes_are_refused(
    tmp_path: pathlib.Path, here: Environment
) -> None:
    file = tmp_path / "odd.json"
    write_catalog(file, file_of(here, (8, 12)))
    with pytest.raises(ScoutError, match="multiples of 8"):
        learned([KERNELS], ExpertsConfig(catalogue=str(file)))


def test_a_catalogue_without_experts_is_a_mistake(path: str) -> None:
    with pytest.raises(ScoutError, match=r"experts\.modules"):
        learned([None], ExpertsConfig(catalogue=path))


def test_the_models_own_kernel_answers_for_vectors_that_the_catalogue_does_not_hold(
    tmp_path: pathlib.Path,
) -> None:
    from scout_core.decision.schedule import GroupedGemm

    gemm = GroupedGemm(16, 32, experts=2, num_sms=machine()["num_sms"])
    kernels = dataclasses.replace(
        KERNELS, library=OWN_KERNEL, settings=gemm.settings, grouped=True, row_alignment=1
    )
    found_in = environment_of(kernels, machine(), TOPOLOGY)
    catalog = build_catalog(gemm.observation((n, n)) for n in range(1, 200))
    file = tmp_path / "model.json"
    write_catalog(file, CatalogFile(found_in, Discovery("model", 199, 3, 0, 0, 0, {}), catalog))
    (each,) = learned([kernels], ExpertsConfig(catalogue=str(file)))
    assert each.replays is not None
    each.replays.on_calls([(1, (60, 100))])
    covering = catalog.covering(gemm.observation((60, 100)))
    assert (each.replays.shares.catalogue == 160) is (covering is not None)


def test_degrees_are_written_as_the_command_line_takes_them() -> None:
    assert degrees_of(Topology.from_degrees(d=4, e=2)) == "d=4,e=2"
    assert degrees_of(Topology.from_degrees()) == "d=1"
