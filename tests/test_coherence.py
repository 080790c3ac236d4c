"""Low-precision parameters equal their masters cast down; who is at fault when they do not."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scout_core.decision.coherence import Incoherent, judge
from scout_core.evidence.coherence import CoherenceWatch, MasterPair
from scout_core.lab.faults import Magnitude, flip_bit

HALF = (torch.bfloat16, torch.float16)


def pair(seed: int, dtype: torch.dtype, sizes: tuple[int, ...], owners: int = 4) -> MasterPair:
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(sum(sizes) + 3, generator=generator)  # 3 elements of padding
    parts = tuple((f"layer.{i}", size) for i, size in enumerate(sizes))
    return MasterPair(master.to(dtype), master, parts, owners)


seeds = st.integers(0, 2**32 - 1)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple)


@given(seeds, sizes, st.sampled_from(HALF), st.integers(1, 5))
def test_parameters_that_are_their_masters_cast_down_are_coherent(
    seed: int, parts: tuple[int, ...], dtype: torch.dtype, looks: int
) -> None:
    watch = CoherenceWatch(lambda: [pair(seed, dtype, parts)])
    for step in range(looks):
        watch.look(step)
    assert watch.found() == ()


@given(seeds, sizes, st.sampled_from(HALF), st.sampled_from(list(Magnitude)))
def test_one_flipped_bit_is_found_and_its_parameter_named(
    seed: int, parts: tuple[int, ...], dtype: torch.dtype, magnitude: Magnitude
) -> None:
    both = pair(seed, dtype, parts)
    watch = CoherenceWatch(lambda: [both])
    index = random.Random(seed).randrange(sum(parts))
    flip_bit(both.held[index : index + 1], magnitude)
    watch.look(7)
    (found,) = watch.found()
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    owner = next(i for i, end in enumerate(ends) if index < end)
    assert found == Incoherent(f"layer.{owner}", 7, 1, parts[owner], 4)


def test_a_mismatch_that_the_next_update_heals_is_still_reported_with_its_step() -> None:
    both = pair(1, torch.bfloat16, (8,))
    watch = CoherenceWatch(lambda: [both])
    flip_bit(both.held[2:3], Magnitude.SIGN)
    watch.look(4)
    both.held.copy_(both.master)
    watch.look(5)
    assert [found.step for found in watch.found()] == [4]


def test_what_was_seen_is_forgotten_after_clear() -> None:
    both = pair(2, torch.bfloat16, (8,))
    watch = CoherenceWatch(lambda: [both])
    flip_bit(both.held[:1], Magnitude.LOW_BIT)
    watch.look(1)
    both.held.copy_(both.master)
    watch.clear()
    watch.look(2)
    assert watch.found() == ()


def test_a_parameter_that_differs_at_start_is_listed_and_not_watched() -> None:
    good, bad = pair(3, torch.bfloat16, (8,)), pair(4, torch.bfloat16, (8, 8))
    flip_bit(bad.held[9:10], Magnitude.EXPONENT)
    watch = CoherenceWatch(lambda: [bad, good])
    watch.look(1)
    (gap,) = watch.gaps()
    assert gap.startswith("layer.0 and 1 more")
    assert watch.found() == ()


def test_nan_of_any_payload_equals_nan_and_minus_zero_differs_from_zero() -> None:
    master = torch.tensor([float("nan"), 0.0])
    both = MasterPair(master.to(torch.bfloat16), master, (("p", 2),), 4)
    watch = CoherenceWatch(lambda: [both])
    both.held.view(torch.int16)[0] ^= 1
    watch.look(1)
    assert watch.found() == ()
    flip_bit(both.held[1:], Magnitude.SIGN)
    watch.look(2)
    assert [(f.step, f.changed) for f in watch.found()] == [(2, 1)]


def test_pieces_of_one_comparison_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scout_core.evidence.coherence._PIECE_ELEMENTS", 5)
    both = pair(5, torch.bfloat16, (12, 12))
    watch = CoherenceWatch(lambda: [both])
    for index in (13, 21, 23):
        flip_bit(both.held[index : index + 1], Magnitude.MID_BIT)
    watch.look(0)
    assert watch.found() == (Incoherent("layer.1", 0, 3, 12, 4),)


def test_a_job_without_masters_has_nothing_to_watch() -> None:
    assert CoherenceWatch(tuple).is_empty


@given(st.integers(3, 64), st.data())
def test_a_strict_minority_of_the_owners_of_a_shard_is_named(
    owners: int, data: st.DataObject
) -> None:
    most = (owners - 1) // 2
    bad = data.draw(st.sets(st.integers(0, owners - 1), min_size=1, max_size=most))
    found = {r: (Incoherent("w", 3, 90, 100, owners),) if r in bad else () for r in range(owners)}
    assert [(j.ranks, j.is_fault) for j in judge(found)] == [((r,), True) for r in sorted(bad)]


@given(st.integers(3, 64), st.data())
def test_half_of_the_owners_or_more_is_an_edit_and_names_nobody(
    owners: int, data: st.DataObject
) -> None:
    least = (owners + 1) // 2
    bad = data.draw(st.sets(st.integers(0, owners - 1), min_size=least))
    names = {r: data.draw(st.sampled_from("abc")) for r in sorted(bad)}
    found = {r: (Incoherent(name, 3, 1, 1000, owners),) for r, name in names.items()}
    (only,) = judge(found)
    assert (only.is_fault, set(only.ranks)) == (False, bad)


@pytest.mark.parametrize(("changed", "elements", "named"), [(1, 1000, True), (500, 1000, False)])
def test_without_other_owners_few_elements_are_a_fault_and_many_an_edit(
    changed: int, elements: int, named: bool
) -> None:
    (only,) = judge({5: (Incoherent("w", 3, changed, elements, 1),), 6: ()})
    assert (only.is_fault, only.ranks) == (named, (5,))


def test_a_scalar_without_other_owners_names_nobody() -> None:
    (only,) = judge({0: (Incoherent("logit_scale", 3, 1, 1, 1),)})
    assert not only.is_fault
