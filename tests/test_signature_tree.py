"""Signatures of nested inputs: what peers pass to a layer, compared as one value."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import math
import struct
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.decision.evidence import Missing, Signature
from scout_core.evidence.signature import signature_tree


class Mode(enum.Enum):
    CAUSAL = "causal"
    FULL = "full"


class Level(enum.IntEnum):
    ONE = 1


class Option(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: int


class OtherPoint(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Packed:
    lengths: torch.Tensor
    causal: bool = True
    later: int = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    x: Any
    y: Any


class Opaque:
    pass


class Strange(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("user code ran")


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([*Mode, torch.float32, torch.bfloat16, torch.strided, torch.Size([1, 2])]),
    st.lists(st.integers(-2, 2), max_size=3).map(torch.tensor),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 9)), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.frozensets(st.integers(0, 9), max_size=3),
    ),
    max_leaves=8,
)


def described(tree: Any) -> str:
    """A readable form that is equal exactly for trees that should compare equal."""
    match tree:
        case torch.Tensor():
            return f"tensor {tree.dtype} {tree.tolist()}"
        case dict():
            return f"dict {sorted((described(k), described(v)) for k, v in tree.items())}"
        case frozenset():
            return f"frozenset {sorted(tree)}"
        case Pair():
            return f"Pair {[described(tree.x), described(tree.y)]}"
        case list() | tuple():
            return f"{type(tree).__name__} {[described(element) for element in tree]}"
        case float():
            return f"float {struct.pack('<d', tree).hex()}"
        case complex():
            return f"complex {described(tree.real)} {described(tree.imag)}"
    return f"{type(tree).__name__} {tree!r}"


@settings(max_examples=150)
@given(TREES, TREES)
def test_trees_have_equal_signatures_exactly_when_they_are_equal(a: Any, b: Any) -> None:
    assert (signature_tree(a) == signature_tree(b)) == (described(a) == described(b))


@given(TREES)
def test_a_copy_made_elsewhere_has_the_same_signature(tree: Any) -> None:
    assert signature_tree(tree) == signature_tree(copy.deepcopy(tree))
    assert isinstance(signature_tree(tree), Signature)


@given(st.dictionaries(st.text(max_size=3), LEAVES, min_size=2, max_size=5), st.randoms())
def test_the_order_of_a_dict_does_not_matter(entries: dict[str, Any], random: Any) -> None:
    shuffled = list(entries.items())
    random.shuffle(shuffled)
    assert signature_tree(dict(shuffled)) == signature_tree(entries)


DISTINCT = [
    *(0, 1, -1, 2**70, -(2**70), 1.0, -1.0, 0.0, -0.0, True, False, None, 1 + 0j, 1j),
    *(float("nan"), float("inf"), "", "1", b"", b"1", bytearray(b"1"), "None"),
    *([], (), {}, set(), frozenset(), [0], (0,), {0}, frozenset({0}), {0: None}, [[]], [None]),
    *([[1], [2]], [[1, 2]], [1, [2]], [[1], 2], ["ab"], ["a", "b"], {"a": "b"}, {"b": "a"}),
    *(Mode.CAUSAL, Mode.FULL, Level.ONE, Option.A, Option.A | Option.B, "CAUSAL"),
    *(Point(1, 2), OtherPoint(1, 2), Pair(1, 2), (1, 2), [1, 2], torch.Size([1, 2])),
    *(torch.float32, torch.float16, torch.device("cpu"), torch.device("cuda"), torch.strided),
    *(torch.contiguous_format, torch.channels_last, "torch.float32"),
    *(torch.tensor(1), torch.tensor(1.0), torch.tensor([1]), torch.tensor(True)),
    *([torch.tensor(1)], {"mask": torch.tensor(1)}, {"bias": torch.tensor(1)}),
    *(collections.OrderedDict(), collections.defaultdict(list), Option(0)),
]


def test_values_of_different_kinds_are_pairwise_distinct() -> None:
    signatures = [signature_tree(value) for value in DISTINCT]
    assert all(isinstance(found, Signature) for found in signatures)
    assert len(set(signatures)) == len(DISTINCT)


def test_text_cannot_imitate_structure() -> None:
    between = "builtins.str"
    assert signature_tree(["a" + between + "b", "c"]) != signature_tree(["a", "b" + between + "c"])
    assert signature_tree([b"1:a1:b", b""]) != signature_tree([b"1:a", b"1:b"])


def test_nan_equals_itself() -> None:
    assert signature_tree([float("nan")]) == signature_tree([math.nan])


def test_the_number_of_a_device_does_not_matter_because_peers_have_their_own() -> None:
    assert signature_tree(torch.device("cuda:0")) == signature_tree(torch.device("cuda:3"))


def test_one_changed_bit_in_a_nested_tensor_is_seen() -> None:
    tree = {"hidden": [(torch.zeros(3), Packed(torch.arange(3)))], "mask": None}
    changed = copy.deepcopy(tree)
    assert signature_tree(changed) == signature_tree(tree)
    changed["hidden"][0][1].lengths[2] += 1  # type: ignore[index]
    assert signature_tree(changed) != signature_tree(tree)


def test_tensors_that_trade_places_are_seen() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert signature_tree({"q": a, "k": b}) != signature_tree({"q": b, "k": a})


UNKNOWN = [Opaque(), lambda: None, Opaque, object(), range(3), iter([]), torch.Generator(), len]


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, v], lambda v: {"k": {"x": (v,)}}])
def test_an_unknown_type_is_missing_by_name_and_no_exception(value: Any, wrap: Any) -> None:
    found = signature_tree(wrap(value))
    assert isinstance(found, Missing)
    assert type(value).__qualname__ in found.reason


def test_a_field_of_unknown_type_makes_a_dataclass_missing() -> None:
    assert isinstance(signature_tree(Pair(1, Opaque())), Missing)


def test_a_dataclass_field_that_was_never_set_is_a_value_of_its_own() -> None:
    unset, with_value = Packed(torch.ones(1)), Packed(torch.ones(1))
    with_value.later = 3
    assert signature_tree(unset) == signature_tree(Packed(torch.ones(1)))
    assert signature_tree(unset) != signature_tree(with_value)


def test_code_of_a_subclass_does_not_run() -> None:
    assert isinstance(signature_tree(Strange([1, 2])), Signature)
    assert signature_tree(Strange([1, 2])) != signature_tree(Strange([1, 3]))


def test_tensors_as_keys_have_no_order_and_are_missing() -> None:
    assert isinstance(signature_tree({torch.ones(1): 1}), Missing)
    assert isinstance(signature_tree({torch.ones(1)}), Missing)


def ring(length: int) -> list[Any]:
    first: list[Any] = [length]
    last = first
    for _ in range(length):
        last.append([])
        last = last[-1]
    last.append(first)
    return first


def test_a_structure_that_contains_itself_has_a_signature() -> None:
    assert signature_tree(ring(3)) == signature_tree(ring(3))
    assert signature_tree(ring(3)) != signature_tree(ring(4))
    table: dict[str, Any] = {"n": 1}
    table["self"] = table
    assert isinstance(signature_tree(table), Signature)


def test_nesting_without_end_in_sight_is_missing() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    wide: list[Any] = []
    for _ in range(60):
        wide = [wide, wide]
    assert isinstance(signature_tree(deep), Missing)
    assert isinstance(signature_tree(wide), Missing)


def test_an_object_used_twice_is_no_cycle() -> None:
    shared = [1]
    assert signature_tree([shared, shared]) == signature_tree([[1], [1]])
