"""Signatures of tensors: nothing changed is missed, nothing equal differs, by both algorithms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scout_core.decision.evidence import Missing, Signature
from scout_core.errors import ScoutError
from scout_core.evidence import signature as signing
from scout_core.testing import run_ranks

Sign = Callable[[Tensor], int]
both = pytest.mark.parametrize("sign", [signing.signature, signing.scout64])

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.uint4),
    *(torch.complex32, torch.complex64, torch.complex128),
]


def random_bytes(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    """A copy with one bit of one element inverted; bit 0 is the lowest of the little-endian."""
    copy = tensor.clone()
    place = element * tensor.itemsize + bit // 8
    copy.view(-1).view(torch.uint8)[place] ^= 1 << bit % 8
    return copy


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_flip_of_a_small_tensor_of_any_dtype_is_seen(
    sign: Sign, dtype: torch.dtype
) -> None:
    raw = random_bytes(3 * dtype.itemsize)
    seen = {sign(raw.view(dtype))}
    for bit in range(8 * raw.numel()):
        changed = raw.clone()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(sign(changed.view(dtype)))
    assert len(seen) == 8 * raw.numel() + 1


EXPONENT_AND_SIGN = {
    torch.float32: range(23, 32),
    torch.bfloat16: range(7, 16),
    torch.float64: range(52, 64),
}


@both
@pytest.mark.parametrize("dtype", EXPONENT_AND_SIGN, ids=str)
@settings(max_examples=10, deadline=None)
@given(element=st.integers(0, (1 << 20) - 1))
def test_sign_and_exponent_flips_among_a_million_elements_are_seen(
    sign: Sign, dtype: torch.dtype, element: int
) -> None:
    tensor = MILLIONS[dtype]
    unchanged = sign(tensor)
    for bit in EXPONENT_AND_SIGN[dtype]:
        assert sign(flipped(tensor, element, bit)) != unchanged


MILLIONS = {dtype: normal(1 << 20).to(dtype) for dtype in EXPONENT_AND_SIGN}


@both
@given(st.integers(0, 63), st.integers(0, 63), st.integers(0, 2**16))
def test_swapped_elements_are_seen(sign: Sign, i: int, j: int, seed: int) -> None:
    tensor = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(seed)).float()
    swapped = tensor.clone()
    swapped[[i, j]] = tensor[[j, i]]
    assert (sign(swapped) == sign(tensor)) == torch.equal(swapped, tensor)


@both
@given(st.permutations(range(8)))
def test_swapped_blocks_are_seen(sign: Sign, order: list[int]) -> None:
    blocks = normal(8, 4096)
    assert (sign(blocks[order]) == sign(blocks)) == (order == sorted(order))


@both
@given(
    st.lists(st.integers(0, 199), min_size=2, max_size=2, unique=True),
    st.sampled_from([1, -1, 2**31, 2**32, 2**62, -(2**63)]),
)
def test_changes_that_cancel_in_a_sum_are_seen(sign: Sign, places: list[int], change: int) -> None:
    tensor = torch.arange(200)
    compensated = tensor.clone()
    compensated[places[0]] += change
    compensated[places[1]] -= change
    assert sign(compensated) != sign(tensor)


@both
def test_two_flipped_signs_are_seen_wherever_they_are(sign: Sign) -> None:
    tensor = normal(48)
    seen = set()
    for pair in itertools.combinations(range(48), 2):
        negated = tensor.clone()
        negated[list(pair)] *= -1
        seen.add(sign(negated))
    assert len(seen) == 48 * 47 // 2
    assert sign(tensor) not in seen


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_two_zeros_differ(sign: Sign, dtype: torch.dtype) -> None:
    zeros = torch.zeros(9, dtype=dtype)
    assert sign(zeros) != sign(-zeros)


@both
def test_nans_differ_by_payload_and_equal_by_bits(sign: Sign) -> None:
    payloads = [torch.tensor([bits, 0], dtype=torch.int32) for bits in (0x7FC00000, 0x7FC00001)]
    nans = [bits.view(torch.float32) for bits in payloads]
    assert sign(nans[0]) != sign(nans[1])
    assert sign(nans[0]) == sign(nans[0].clone())
    assert sign(torch.full((5,), float("nan"))) == sign(torch.full((5,), float("nan")))


@both
def test_shape_dtype_and_padding_count_beside_the_bytes(sign: Sign) -> None:
    shapes: list[Any] = [(0,), (1,), (), (2,), (4,), (2, 2), (4, 1), (8,), (0, 4), (4, 0), (1, 4)]
    zeros = [torch.zeros(shape) for shape in shapes]
    bytes_of = [(dtype, torch.zeros(4 * dtype.itemsize, dtype=torch.uint8)) for dtype in DTYPES]
    zeros += [raw.view(dtype) for dtype, raw in bytes_of if dtype != torch.float32]
    assert len({sign(tensor) for tensor in zeros}) == len(zeros)


@both
@settings(max_examples=60)
@given(st.data())
def test_only_values_count_not_strides(sign: Sign, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    start, step = data.draw(st.integers(0, shape[order[0]] - 1)), data.draw(st.integers(1, 2))
    copies = data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from(DTYPES))

    def rearranged(tensor: Tensor) -> Tensor:
        view = tensor.view(shape).permute(order)[start::step]
        return view.expand(copies, *view.shape)

    elements = random_bytes(torch.Size(shape).numel() * dtype.itemsize).view(-1, dtype.itemsize)
    chosen = rearranged(torch.arange(len(elements)))
    plain = elements[chosen.flatten()].view(dtype).view(chosen.shape)
    assert sign(rearranged(elements.view(dtype))) == sign(plain)


@both
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("size", [(3, 4), (300, 400)])
def test_lazy_conjugates_and_negatives_equal_resolved_ones(
    sign: Sign, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    values = torch.complex(normal(*size), normal(*size, seed=1)).to(dtype)
    lazy = values.conj()
    assert lazy.is_conj()
    assert lazy.imag.is_neg()
    assert sign(lazy) == sign(lazy.resolve_conj().clone()) != sign(values)
    assert sign(lazy.imag) == sign(-values.imag.clone()) != sign(values.imag)
    assert sign(lazy.t()) == sign(lazy.t().resolve_conj().contiguous())


@both
def test_parameters_and_results_that_need_gradients_are_signed_like_plain_tensors(
    sign: Sign,
) -> None:
    plain = normal(4, 4)
    parameter = torch.nn.Parameter(plain.clone())
    assert sign(parameter) == sign(plain)
    assert sign(parameter * 2) == sign(plain * 2)
    with torch.inference_mode():
        assert sign(plain.clone()) == sign(plain)


@both
@pytest.mark.parametrize("size", [1, 1000, (1 << 19) + 3])
def test_a_signed_storage_can_still_be_resized(sign: Sign, size: int) -> None:
    """FSDP frees and restores the storage of gathered parameters; Tensor.numpy() forbids it."""
    tensor = normal(size)
    before = sign(tensor)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4 * size)
    tensor.copy_(normal(size))
    assert sign(tensor) == before


def refused() -> dict[str, Tensor]:
    eye = torch.eye(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3)
    return {
        "quantised": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
        "sparse": eye.to_sparse(),
        "sparse_csr": eye.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested jagged": torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        ),
        "meta": torch.empty(3, device="meta"),
        "FakeTensor": fake,
        "freed": freed,
    }


@both
@pytest.mark.filterwarnings("ignore:.*(in beta state|prototype stage|quantiz|deprecated).*")
@pytest.mark.parametrize(
    "layout",
    ["quantised", "sparse", "sparse_csr", "nested", "nested jagged", "meta", "FakeTensor", "freed"],
)
def test_a_tensor_without_bytes_of_its_own_is_refused_by_name(sign: Sign, layout: str) -> None:
    tensor = refused()[layout]
    name = layout.split("_")[0].split()[0]
    with pytest.raises(ScoutError, match=f"a {name} tensor of"):
        sign(tensor)
    found = signing.signature_tree({"hidden": [torch.ones(2), tensor]})
    assert isinstance(found, Missing)
    assert f"a {name} tensor" in found.reason


def test_many_signatures_at_once_equal_one_by_one() -> None:
    tensors = [normal(n, seed=n) for n in range(20)]
    assert signing.signatures(tensors) == [signing.signature(tensor) for tensor in tensors]
    assert signing.signatures([]) == []


def test_a_signature_has_64_unsigned_bits_and_carries_its_algorithm() -> None:
    values = [signing.signature(normal(3, seed=seed)) for seed in range(64)]
    assert all(0 <= value < 1 << 64 for value in values)
    assert max(values) >= 1 << 63
    assert signing.evidence(normal(3)) == Signature(signing.signature(normal(3)), "xxh3")
    assert signing.algorithm_of(torch.ones(1)) == "xxh3"
    assert signing.algorithm_of(torch.ones(1, device="meta")) == "scout64"


def test_the_algorithms_never_change_silently() -> None:
    tensor = torch.arange(12).view(3, 4)
    assert (signing.signature(tensor), signing.scout64(tensor)) == (
        15786418330227982960,
        9793587203478592734,
    )


def test_the_algorithms_disagree_so_that_mixing_them_cannot_pass_unseen() -> None:
    assert signing.signature(normal(9)) != signing.scout64(normal(9))


def shards_sign_as_plain_tensors(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole = normal(5, 4)
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    expected = whole[:3] if rank == 0 else whole[3:]
    parameter = torch.nn.Parameter(shard)
    assert isinstance(parameter, DTensor)
    return [
        sign(tensor) == sign(expected.clone())
        for sign in (signing.signature, signing.scout64)
        for tensor in (shard, parameter, parameter * 1)
    ]


def pending_result_signs_as_its_value(rank: int) -> bool:
    pending = functional.all_reduce(normal(4, seed=rank), "sum", [0, 1])
    assert isinstance(pending, functional.AsyncCollectiveTensor)
    summed = normal(4, seed=0) + normal(4, seed=1)
    return signing.signature(pending) == signing.signature(summed)


def test_a_collective_that_is_under_way_is_waited_for() -> None:
    assert run_ranks(2, pending_result_signs_as_its_value) == [True, True]


def test_a_dtensor_is_signed_by_its_local_shard() -> None:
    assert run_ranks(2, shards_sign_as_plain_tensors) == [[True] * 6] * 2
