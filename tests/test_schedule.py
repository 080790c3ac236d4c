"""The schedule model equals a literal walk through the kernel, tile by tile and step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.catalog import build_catalog
from scout_core.decision.schedule import GroupedGemm, Launch, Phase, Role, Tile, uniform
from scout_core.errors import ScoutError

KIND = {  # (beyond the last row, beyond the last column) -> what a tile is
    (False, False): Role.INTERIOR,
    (True, False): Role.ROW_TAIL,
    (False, True): Role.COLUMN_TAIL,
    (True, True): Role.CORNER,
}

tiles = st.builds(Tile, *[st.integers(2, 9)] * 3)


@st.composite
def projections(draw: st.DrawFn) -> tuple[GroupedGemm, tuple[int, ...]]:
    experts = draw(st.integers(1, 5))
    gemm = GroupedGemm(
        in_features=draw(st.integers(1, 20)),
        out_features=draw(st.integers(1, 20)),
        experts=experts,
        num_sms=draw(st.integers(1, 12)),
        tile=draw(tiles),
        weight_tile=draw(tiles),
        max_slices=draw(st.sampled_from([1, 2, 8])),
        even_slices=draw(st.booleans()),
        schedule=draw(st.sampled_from(["auto", "direct", "persistent"])),
    )
    rows = draw(st.lists(st.integers(0, 40), min_size=experts, max_size=experts))
    return gemm, tuple(rows)


def walk(launch: Launch) -> list[list[int]]:
    """What each program does, written as the kernel is: no closed form, tile by tile."""
    counts = [dict.fromkeys(Role, 0) for _ in range(launch.programs)]
    number = 0
    extents = np.stack([launch.rows, launch.columns, launch.reduction], axis=1).tolist()
    for rows, columns, depth in extents:
        entered = set()
        for row in range(0, rows, launch.tile.rows):
            for column in range(0, columns, launch.tile.columns):
                starts = list(range(0, depth, launch.tile.reduction))
                beyond = (
                    row + launch.tile.rows > rows,
                    column + launch.tile.columns > columns,
                )
                for part in range(launch.slices):
                    own = counts[number % launch.programs]
                    own[Role.PROGRAM if number < launch.programs else Role.RESUME] += 1
                    own[Role.ENTER] += number % launch.programs not in entered
                    entered.add(number % launch.programs)
                    own[KIND[beyond]] += 1
                    steps = share(starts, part, launch.slices, launch.even)
                    for start in steps:
                        whole = start + launch.tile.reduction <= depth
                        own[Role.REDUCE if whole else Role.REDUCE_TAIL] += 1
                    own[Role.EMPTY] += not steps
                    number += 1
    return [[own[role] for role in Role] for own in counts]


def share(starts: list[int], part: int, slices: int, even: bool) -> list[int]:
    if even:
        bounds = [len(starts) * i // slices for i in range(slices + 1)]
        return starts[bounds[part] : bounds[part + 1]]
    length = -(-len(starts) // slices)
    return starts[part * length : (part + 1) * length]


@given(projections())
def test_each_program_does_what_a_walk_through_the_kernel_does(
    drawn: tuple[GroupedGemm, tuple[int, ...]],
) -> None:
    gemm, rows = drawn
    for launch in gemm.launches(rows):
        assert launch.program_counts().tolist() == walk(launch)


@given(projections())
def test_the_closed_form_is_the_sum_over_the_programs(
    drawn: tuple[GroupedGemm, tuple[int, ...]],
) -> None:
    gemm, rows = drawn
    for launch in gemm.launches(rows):
        assert launch.counts().tolist() == launch.program_counts().sum(axis=0).tolist()


@given(projections(), st.randoms(use_true_random=False))
def test_the_order_of_experts_changes_no_count_of_a_launch(
    drawn: tuple[GroupedGemm, tuple[int, ...]], shuffle: object
) -> None:
    gemm, rows = drawn
    mixed = list(rows)
    shuffle.shuffle(mixed)  # type: ignore[attr-defined]
    original, other = gemm.observation(rows), gemm.observation(tuple(mixed))
    assert (original.fingerprint, original.path_counts) == (other.fingerprint, other.path_counts)


@given(projections())
def test_a_direct_launch_has_a_program_for_every_tile_and_auto_never_more_than_sms(
    drawn: tuple[GroupedGemm, tuple[int, ...]],
) -> None:
    gemm, rows = drawn
    for launch in gemm.launches(rows):
        tiles_in_all = int(launch.tiles.sum())
        if not launch.persistent:
            assert launch.programs == tiles_in_all
        if gemm.schedule != "direct":
            assert launch.programs <= gemm.num_sms
        if gemm.schedule == "auto":
            assert launch.persistent == (tiles_in_all > gemm.num_sms)


@given(projections())
def test_dominance_program_by_program_implies_dominance_of_the_launch(
    drawn: tuple[GroupedGemm, tuple[int, ...]],
) -> None:
    gemm, rows = drawn
    larger = tuple(n + 1 for n in rows)
    fine = build_catalog([gemm.observation(r, per_program=True) for r in (rows, larger)])
    coarse = build_catalog([gemm.observation(r) for r in (rows, larger)])
    if len(fine.representatives) == 1:
        assert coarse.representatives == fine.representatives


def test_a_hundred_and_nine_tiles_on_108_sms_start_the_persistent_schedule() -> None:
    gemm = GroupedGemm(128, 128)
    assert not gemm.launches(3456)[0].persistent
    forward = gemm.launches(3457)[0]
    assert forward.persistent
    counts = dict(zip(Role, forward.counts().tolist(), strict=True))
    assert (counts[Role.PROGRAM], counts[Role.RESUME], counts[Role.ROW_TAIL]) == (108, 1, 1)


def test_an_expert_without_rows_has_an_empty_weight_gradient_and_nothing_else() -> None:
    gemm = GroupedGemm(128, 128, experts=2)
    one = gemm.observation((64, 0)).path_counts
    assert isinstance(one, dict)
    assert one["weight_gradient/empty"] == 4
    assert one["forward/interior"] == 2


def test_no_rows_at_all_launch_no_forward() -> None:
    forward, _, weights = GroupedGemm(8, 8).launches(0)
    assert (forward.programs, forward.fingerprint) == (0, "forward none")
    assert weights.phase is Phase.WEIGHT_GRADIENT
    assert weights.programs == 1


@pytest.mark.parametrize(("rows", "slices"), [(31, 1), (64, 2), (511, 8), (512, 16), (9000, 16)])
def test_the_reduction_is_cut_as_far_as_rows_and_sms_allow(rows: int, slices: int) -> None:
    assert GroupedGemm(128, 128).slices([rows]) == slices


def test_uniform_shapes_need_few_representatives_and_the_proof_holds() -> None:
    gemm = GroupedGemm(128, 128, experts=4)
    catalog = build_catalog(gemm.observation(uniform(4, n)) for n in range(1, 300))
    assert len(catalog.regimes) == 3
    assert len(catalog.representatives) < 10
    for shape in catalog.shapes:
        above = gemm.observation(catalog.representative_of(shape)).path_counts
        below = gemm.observation(shape).path_counts
        assert isinstance(above, dict)
        assert isinstance(below, dict)
        assert all(above[path] >= below[path] for path in below)


@pytest.mark.parametrize("shape", [(1, 2), (), (-1,), (1, 2, 3, 4)])
def test_a_shape_with_another_number_of_experts_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ScoutError, match="for each of the 3 experts"):
        GroupedGemm(8, 8, experts=3).launches(shape)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ScoutError, match=r"every size of .* must be >= 1"):
        GroupedGemm(8, 8, tile=Tile(0, 1, 1))


def test_settings_name_what_decides_the_schedule() -> None:
    base = GroupedGemm(8, 8)
    others = [
        GroupedGemm(8, 8, tile=Tile(16, 16, 16)),
        GroupedGemm(8, 8, weight_tile=Tile(16, 16, 16)),
        GroupedGemm(8, 8, max_slices=2),
        GroupedGemm(8, 8, even_slices=False),
        GroupedGemm(8, 8, schedule="direct"),
    ]
    assert len({gemm.settings for gemm in (base, *others)}) == 6
    assert np.unique([len(launch.rows) for launch in base.launches(1)]).tolist() == [1]


@given(projections())
def test_settings_can_be_read_back(case: tuple[GroupedGemm, tuple[int, ...]]) -> None:
    gemm, _ = case
    sizes = (gemm.in_features, gemm.out_features, gemm.experts, gemm.num_sms)
    assert GroupedGemm.from_settings(*sizes, gemm.settings) == gemm


def test_settings_of_other_kernels_are_refused() -> None:
    with pytest.raises(ScoutError, match="schedule model"):
        GroupedGemm.from_settings(1, 1, 1, 1, "one launch per expert")
