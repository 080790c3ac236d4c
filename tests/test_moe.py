"""The lab's mixture of experts: every token meets its expert, whatever the padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scout_core.cli.drill import make_plan
from scout_core.errors import ScoutError
from scout_core.lab.injection import part_of
from scout_core.lab.moe import MoE, MoEConfig, by_expert
from scout_core.lab.parallel import Parallelism, topology


@st.composite
def arrivals(draw: st.DrawFn) -> list[list[int]]:
    senders, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 5), min_size=experts, max_size=experts)
    return draw(st.lists(counts, min_size=senders, max_size=senders))


@given(arrivals(), st.sampled_from([1, 4, 8]))
def test_tokens_are_put_expert_by_expert_and_padded(came: list[list[int]], alignment: int) -> None:
    owner = [e for sender in came for e, n in enumerate(sender) for _ in range(n)]
    index, rows = by_expert(came, alignment)
    assert sorted(i for i in index if i < len(owner)) == list(range(len(owner)))
    assert all(n % alignment == 0 for n in rows)
    for expert, part in enumerate(torch.split(torch.tensor(index, dtype=torch.int64), rows)):
        real = [int(i) for i in part if i < len(owner)]
        assert [owner[i] for i in real] == [expert] * len(real)
        assert len(part) - len(real) < alignment


def test_the_layer_computes_each_token_by_its_own_expert() -> None:
    torch.manual_seed(0)
    layer = MoE(8, MoEConfig(experts=3, alignment=4))
    x = torch.randn(2, 10, 8)
    weight, chosen = layer.router(x).softmax(-1).max(-1)
    expected = torch.stack(
        [
            torch.stack(
                [w * layer.experts.experts[int(e)](t) for t, w, e in zip(*row, strict=True)]
            )
            for row in zip(x, weight, chosen, strict=True)
        ]
    )
    torch.testing.assert_close(layer(x), expected)


def test_eight_ranks_are_two_expert_positions_of_four_replicas() -> None:
    layout = topology(Parallelism.MOE, 8)
    assert layout.peer_group(3, "expert").ranks == (1, 3, 5, 7)
    assert layout.peer_group(3, "dense").ranks == tuple(range(8))
    assert layout.rows == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_the_part_of_an_expert_is_a_view_of_its_rows() -> None:
    packed = torch.zeros(7, 2)
    part_of(packed, (2, 3, 1), 1).fill_(1)
    assert packed[:, 0].tolist() == [0, 0, 1, 1, 1, 0, 0]
    by_sender = torch.zeros(2, 3, 4, 1)
    part_of(by_sender, (8, 8, 8), 2).fill_(1)
    assert by_sender[:, 2].sum() == by_sender.sum() == 8


@pytest.mark.parametrize(
    ("parallelism", "ranks", "fault", "what"),
    [
        ("ddp", 4, "sdc:rows=64", "needs experts"),
        ("moe", 6, "sdc:rows=65", "multiples of 64"),
        ("moe", 6, "sdc:rows=576", "use 64 to 512"),
        ("moe", 7, "sdc:rows=64", "multiple of 2"),
    ],
)
def test_a_fault_that_never_acts_is_refused(
    parallelism: str, ranks: int, fault: str, what: str
) -> None:
    with pytest.raises(ScoutError, match=what):
        make_plan(parallelism, ranks, [fault])
