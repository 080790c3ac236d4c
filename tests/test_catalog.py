"""The catalogue covers every admissible shape with as few shapes as any can, and says how."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.catalog import (
    Catalog,
    Observation,
    Shape,
    build_catalog,
    exact_observation,
    name_of,
)
from scout_core.decision.catalog_file import (
    CatalogFile,
    Discovery,
    checksum,
    exact_shapes,
)
from scout_core.decision.dominance import minimum_cover
from scout_core.decision.environment import Environment, Reliance, differences, rely_on
from scout_core.errors import ScoutError

ENVIRONMENT = Environment(
    gpu="NVIDIA A100-SXM4-40GB",
    num_sms=108,
    driver="580.65.06",
    cuda="13.0",
    torch="2.13.0",
    nccl="2.29.7",
    kernel_library="scout grouped GEMM",
    kernel_version="1",
    kernel_settings="tile 32x128x64",
    dtype="bfloat16",
    in_features=128,
    out_features=128,
    local_experts=4,
    row_alignment=1,
    degrees="d=4,e=4",
)
DISCOVERY = Discovery("model", 3, 3, 0, 0.5, 0.1, {})
SMALL = st.lists(
    st.tuples(st.sampled_from("FG"), st.tuples(*[st.integers(0, 3)] * 3)), min_size=1, max_size=9
)


def observed(drawn: list[tuple[str, tuple[int, ...]]]) -> list[Observation]:
    return [Observation(i, f, c) for i, (f, c) in enumerate(drawn)]


def dominates(a: Observation, b: Observation) -> bool:
    """The paper's relation, read literally."""
    pairs = zip(a.path_counts, b.path_counts, strict=True)
    return a.fingerprint == b.fingerprint and all(x >= y for x, y in pairs)


def smallest_cover(observations: list[Observation]) -> int:
    """Try every subset, smallest first."""
    for size in range(1, len(observations) + 1):
        for chosen in itertools.combinations(observations, size):
            if all(any(dominates(a, b) for a in chosen) for b in observations):
                return size
    raise AssertionError("the whole set covers itself")


@given(SMALL)
def test_no_smaller_set_covers_than_the_one_found(drawn: list[tuple[str, tuple[int, ...]]]) -> None:
    observations = observed(drawn)
    catalog = build_catalog(observations)
    assert len(catalog.representatives) == smallest_cover(observations)


@given(SMALL)
def test_the_proof_names_a_representative_that_dominates_each_shape(
    drawn: list[tuple[str, tuple[int, ...]]],
) -> None:
    observations = observed(drawn)
    catalog = build_catalog(observations)
    for each in observations:
        above = catalog.representative_of(each.shape)
        assert above in catalog.representatives
        assert dominates(observations[above], each)


@given(SMALL)
def test_a_cover_holds_exactly_the_dominated_shapes(
    drawn: list[tuple[str, tuple[int, ...]]],
) -> None:
    observations = observed(drawn)
    catalog = build_catalog(observations)
    for above in catalog.representatives:
        below = {o.shape for o in observations if dominates(observations[above], o)}
        assert set(catalog.covered_by(above)) == below


@given(SMALL, st.randoms(use_true_random=False))
def test_the_order_of_observations_does_not_matter(
    drawn: list[tuple[str, tuple[int, ...]]], shuffle: random.Random
) -> None:
    observations = observed(drawn)
    expected = build_catalog(observations)
    shuffle.shuffle(observations)
    found = build_catalog(observations)
    assert found.representatives == expected.representatives
    assert found.observations() == expected.observations()


@given(SMALL, SMALL)
def test_a_vector_from_outside_is_covered_exactly_when_a_shape_dominates_it(
    drawn: list[tuple[str, tuple[int, ...]]], others: list[tuple[str, tuple[int, ...]]]
) -> None:
    observations = observed(drawn)
    catalog = build_catalog(observations)
    for fingerprint, counts in others:
        outside = Observation(99, fingerprint, counts)
        covered = any(dominates(each, outside) for each in observations)
        assert (catalog.covering(outside) is not None) == covered


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([3, 40, 10**6, 2**40]))
def test_bit_sets_agree_with_comparing_all_pairs(seed: int, paths: int, most: int) -> None:
    counts = np.random.default_rng(seed).integers(0, most, (400, paths))
    cover = minimum_cover(counts)
    above = (counts[None] >= counts[:, None]).all(axis=2)  # [i, j]: j dominates i
    strictly = above & ~above.T
    maximal = {tuple(row) for row in counts[~strictly.any(axis=1)]}
    assert sorted(map(tuple, counts[cover.maximal])) == sorted(maximal)
    assert above[np.arange(400), cover.representative].all()


def test_a_larger_total_that_is_smaller_in_one_path_does_not_cover() -> None:
    catalog = build_catalog([Observation(64, "F", (100, 100, 0)), Observation(3, "F", (1, 1, 1))])
    assert catalog.representatives == (3, 64)


def test_another_fingerprint_does_not_cover_whatever_its_counts() -> None:
    catalog = build_catalog([Observation(64, "F", (9, 9)), Observation(3, "G", (1, 1))])
    assert catalog.representatives == (3, 64)


def test_of_shapes_that_execute_the_same_the_largest_represents() -> None:
    catalog = build_catalog([Observation(n, "F", (2, 1)) for n in (7, 33, 12)])
    assert catalog.representatives == (33,)


def test_named_paths_may_be_left_out_when_they_are_not_executed() -> None:
    catalog = build_catalog(
        [Observation(8, "F", {"tile": 2}), Observation(9, "F", {"tail": 1, "tile": 2})]
    )
    assert catalog.representatives == (9,)
    assert catalog.covering(Observation(1, "F", {"tile": 1, "new": 0})) == 9
    assert catalog.covering(Observation(1, "F", {"tile": 1, "new": 1})) is None


def test_nobody_answers_for_a_shape_that_was_not_observed() -> None:
    catalog = build_catalog([Observation(8, "F", (1,))])
    assert catalog.covers(8)
    assert not catalog.covers(4)
    with pytest.raises(ScoutError, match="shape 4 is not in the catalogue of 1 shapes"):
        catalog.representative_of(4)


def test_shapes_that_cannot_be_seen_cover_only_themselves() -> None:
    shapes: list[Shape] = [1, 2, (2, 2)]
    catalog = build_catalog(map(exact_observation, shapes))
    assert catalog.representatives == (1, 2, (2, 2)) == exact_shapes(catalog)


@pytest.mark.parametrize(
    ("observations", "options", "message"),
    [
        ([], {}, "at least one observation"),
        (
            [(1, "F", (1,)), (1, "G", (1,))],
            {},
            "shape 1 was observed with fingerprints 'F' and 'G'",
        ),
        ([(1, "F", (1, 2)), (1, "F", (2, 2))], {}, r"path counts \[1, 2\] and \[2, 2\]"),
        ([(1, "F", (1,))], {"requested": [1, 2, (3, 4)]}, r"2 of 3 .* not observed: 2, \[3, 4\];"),
        ([(1, "F", (1,))] * 2, {"repeats": 3}, "1 shapes were observed less than 3 times: 1;"),
        ([(1, "F", (1,)), (2, "F", (1, 1))], {}, "shape 2 has 2 path counts and shape 1"),
        ([(1, "F", (-1,))], {}, "integers >= 0"),
        ([(1, "F", (0.5,))], {}, "integers >= 0"),
        ([(1, "F", ())], {}, "at least one per"),
        ([((), "F", (1,))], {}, r"shape \(\) must be"),
        ([((1, -2), "F", (1,))], {}, r"shape \(1, -2\) must be"),
    ],
)
def test_what_is_no_basis_for_a_catalogue_is_an_error_by_name(
    observations: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScoutError, match=message):
        build_catalog([Observation(*each) for each in observations], **options)


def test_three_equal_observations_make_a_discovery() -> None:
    catalog = build_catalog([Observation(5, "F", (1,))] * 3, requested=[5], repeats=3)
    assert catalog.representatives == (5,)


@pytest.mark.parametrize(
    ("shape", "name"), [(7, "7"), ((7,), "7"), ((7, 7, 7), "3 x 7"), ((7, 0), "[7, 0]")]
)
def test_a_shape_has_a_short_name(shape: Shape, name: str) -> None:
    assert name_of(shape) == name


@pytest.mark.parametrize("field", list(asdict(ENVIRONMENT)))
def test_drift_of_any_field_is_named_and_the_catalogue_not_used(field: str) -> None:
    value = getattr(ENVIRONMENT, field)
    live = replace(ENVIRONMENT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert [each.field for each in differences(ENVIRONMENT, live)] == [field]
    exact = rely_on(ENVIRONMENT, live, "exact")
    assert exact.reliance is Reliance.EXACT
    assert field in exact.message
    refused = rely_on(ENVIRONMENT, live, "not_covered")
    assert refused.reliance is Reliance.NOT_COVERED
    assert refused.message.startswith("expert replay not covered")


def test_the_environment_of_the_discovery_may_use_its_catalogue() -> None:
    decision = rely_on(ENVIRONMENT, replace(ENVIRONMENT), "not_covered")
    assert (decision.reliance, decision.differences) == (Reliance.CATALOGUE, ())


@pytest.mark.parametrize(
    "value", ["", "  ", "?", "N/A", "unknown", "<gpu>", "${GPU}", "TBD", "xxx"]
)
def test_a_placeholder_is_no_environment(value: str) -> None:
    with pytest.raises(ScoutError, match=r"environment field driver=.* is a placeholder"):
        replace(ENVIRONMENT, driver=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": None}, "gpu=None in here must be of type str"),
        ({"num_sms": "108"}, "num_sms='108' in here must be of type int"),
        ({"colour": "red"}, "adds colour"),
        ({"num_sms": 0}, "num_sms=0 must be >= 1"),
    ],
)
def test_an_environment_is_read_strictly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoutError, match=message):
        Environment.from_json(ENVIRONMENT.to_json() | change, "here")


def test_a_lacking_environment_field_is_named() -> None:
    values = ENVIRONMENT.to_json()
    del values["nccl"]
    with pytest.raises(ScoutError, match="lacks nccl"):
        Environment.from_json(values, "here")


def written(catalog: Catalog) -> Any:
    return json.loads(json.dumps(CatalogFile(ENVIRONMENT, DISCOVERY, catalog).to_json()))


@given(SMALL)
def test_a_file_gives_back_what_was_written(drawn: list[tuple[str, tuple[int, ...]]]) -> None:
    catalog = build_catalog(
        o._replace(shape=(o.shape, 1) if o.shape == 0 else o.shape) for o in observed(drawn)
    )
    found = CatalogFile.from_json(written(catalog), "the file")
    assert found.environment == ENVIRONMENT
    assert found.discovery == DISCOVERY
    assert found.catalog.observations() == catalog.observations()
    assert found.catalog.representatives == catalog.representatives
    found.refuse_larger_than_needed("the file")


def test_a_file_that_was_changed_is_refused() -> None:
    values = written(build_catalog([Observation(n, "F", (n,)) for n in (1, 2, 3)]))
    values["environment"]["driver"] = "590.1"
    with pytest.raises(ScoutError, match=r"checksum of the file .* changed after it was written"):
        CatalogFile.from_json(values, "the file")


def forged(**change: Any) -> Any:
    values = written(build_catalog([Observation(n, "F", (n, 9 - n)) for n in (1, 2, 3)]))
    values["regimes"][0].update(change)
    del values["checksum"]
    return values | {"checksum": checksum(values)}


def test_a_claimed_cover_that_does_not_hold_is_refused_despite_its_checksum() -> None:
    with pytest.raises(ScoutError, match="does not execute what it should cover"):
        CatalogFile.from_json(forged(representative=[2, 1, 2]), "the file")


def test_a_file_with_too_many_representatives_is_refused_by_check() -> None:
    values = forged(counts=[[1, 1], [2, 1], [3, 1]])
    found = CatalogFile.from_json(values, "the file")
    with pytest.raises(ScoutError, match=r"has 3 representatives, but .* give 1"):
        found.refuse_larger_than_needed("the file")


@pytest.mark.parametrize(
    "change", [{"counts": [[1]]}, {"shapes": None}, {"representative": [7] * 3}]
)
def test_a_damaged_file_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ScoutError, match="the file cannot be read"):
        CatalogFile.from_json(forged(**change), "the file")


@pytest.mark.parametrize("values", [None, [], {"schema": "scout.catalog-file/0"}])
def test_what_is_no_catalogue_is_refused(values: Any) -> None:
    with pytest.raises(ScoutError, match="not a catalogue of schema"):
        CatalogFile.from_json(values, "the file")
