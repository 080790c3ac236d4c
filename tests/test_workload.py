"""Live causes of slowness without a faulty rank, from what each rank measured of itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from scout_core.config import ScoutConfig
from scout_core.decision.topology import Topology
from scout_core.evidence.exchange import LocalExchange, run_threads
from scout_core.evidence.work_clock import StepWork
from scout_core.integration.checker import Told
from scout_core.integration.pytorch import PyTorch
from scout_core.integration.workload import WINDOW_STEPS, Workload, work_of, workers_of
from scout_core.lab.model import GPT, GPTConfig

STAGES = Topology.from_degrees(order="pdst", p=2, s=4)
FLAT = Topology.from_degrees(d=4)


class Scripted:
    """A clock whose rank reports what a test says."""

    def __init__(self, windows: Sequence[list[StepWork] | Exception]) -> None:
        self._windows = list(windows)
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def next_step(self) -> None:
        assert self.is_open

    def close(self) -> list[StepWork]:
        self.is_open = False
        found = self._windows.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def drop(self) -> None:
        self.is_open = False


def step(
    work_s: float, tokens: int = 64, paused_s: float = 0.0, loading_s: float = 0.0
) -> StepWork:
    noise = random.gauss(1.0, 0.01)
    wall = 3 * work_s * noise + paused_s + loading_s
    return StepWork([work_s * noise], [tokens], paused_s, loading_s, wall)


def told(
    topology: Topology, windows: list[list[list[StepWork] | Exception]], interval: int = 20
) -> list[list[Told]]:
    """Feed each rank its windows; return what each rank told."""

    def run(exchange: LocalExchange) -> list[Told]:
        config = ScoutConfig(workload={"interval_steps": interval})  # type: ignore[arg-type]
        model = GPT(GPTConfig(layers=2, width=8, heads=2, context=8))
        framework = PyTorch(model, torch.optim.SGD(model.parameters()))
        look = Workload(exchange, topology, framework, config)
        look._clock = Scripted([each[exchange.rank] for each in windows])  # type: ignore[assignment]
        heard = [look.on_step_end(number) for number in range(1, interval * len(windows) + 1)]
        look.close()
        return [each for each in heard if each is not None]

    results: list[list[Told]] = run_threads(topology.world_size, run, 20.0)
    return results


def reasons(heard: list[Told]) -> list[list[str]]:
    return [[incident.reason for incident in each.incidents] for each in heard]


def repeat(make: object, ranks: int, windows: int = 3) -> list[list[list[StepWork] | Exception]]:
    return [
        [[make(rank) for _ in range(WINDOW_STEPS)] for rank in range(ranks)]  # type: ignore[operator]
        for _ in range(windows)
    ]


def test_a_slow_stage_is_told_from_its_second_window_on_and_names_nobody() -> None:
    slow = random.randrange(2)
    places = STAGES.dense
    heard = told(STAGES, repeat(lambda r: step(0.15 if places[r].p == slow else 0.1), 8))
    assert [reasons(each) for each in heard] == [[[], ["IMBALANCE_STAGE"], ["IMBALANCE_STAGE"]]] * 8
    incident = heard[0][1].incidents[0]
    assert incident.culprits == ()
    assert incident.id
    assert all(each[1].incidents == heard[0][1].incidents for each in heard)


def test_uneven_sequences_are_explained_by_their_tokens() -> None:
    def one(rank: int) -> StepWork:
        tokens = random.randint(16, 128)
        return step(0.001 * tokens, tokens)

    assert reasons(told(FLAT, repeat(one, 4))[0])[1] == ["IMBALANCE_DATA"]


def test_measured_pauses_and_waiting_for_data_are_told() -> None:
    def paused(rank: int) -> StepWork:
        return step(0.1, paused_s=0.1 if random.random() < 0.4 else 0.0)

    assert reasons(told(FLAT, repeat(paused, 4))[0])[1] == ["IMBALANCE_PAUSES"]
    assert reasons(told(FLAT, repeat(lambda r: step(0.1, loading_s=0.1), 4))[0])[1] == [
        "IMBALANCE_LOADING"
    ]


def test_later_stages_wait_for_activations_and_not_for_data() -> None:
    places = STAGES.dense
    heard = told(STAGES, repeat(lambda r: step(0.1, loading_s=0.1 * places[r].p), 8))
    assert reasons(heard[0]) == [[], [], []]


@pytest.mark.parametrize("topology", [FLAT, STAGES])
def test_even_work_is_not_told(topology: Topology) -> None:
    heard = told(topology, repeat(lambda r: step(0.1), topology.world_size))
    assert reasons(heard[0]) == [[], [], []]


def test_a_slow_rank_is_left_to_the_replays() -> None:
    slow = random.randrange(4)
    heard = told(FLAT, repeat(lambda r: step(0.2 if r == slow else 0.1), 4))
    assert reasons(heard[0]) == [[], [], []]


def test_an_error_of_one_rank_is_told_to_all() -> None:
    windows = repeat(lambda r: step(0.1), 4, windows=1)
    windows[0][random.randrange(4)] = ValueError("odd arguments")
    for (heard,) in told(FLAT, windows):
        assert "odd arguments" in heard.broken


def test_a_window_in_which_a_rank_saw_nothing_is_not_judged() -> None:
    workers = workers_of(FLAT)
    blind = StepWork([], [], 0.0, 0.0, 0.1)
    assert work_of(workers, 20, [[blind] * 3, *[[step(0.1)] * 3] * 3], False) is None
    assert work_of(workers, 20, [[], *[[step(0.1)] * 3] * 3], False) is None


def test_ranks_with_fewer_micro_batches_leave_gaps() -> None:
    two = StepWork([0.1, 0.2], [3, 4], 0.0, 0.0, 1.0)
    one = StepWork([0.3], [5], 0.0, 0.5, 1.0)
    work = work_of(workers_of(FLAT), 9, [[two], [one], [two], [one, two]], False)
    assert work is not None
    assert work.steps == (9,)
    np.testing.assert_allclose(work.seconds[0, 1, 0], [0.9, np.nan])
    np.testing.assert_allclose(work.seconds[0, 3, 0], [0.3, 0.6])


@pytest.mark.parametrize(("waits_first", "expected"), [(False, [0.1, 0.7]), (True, [0.1, 0.1])])
def test_waiting_for_the_last_rank_before_the_first_layer_is_not_waiting_for_data(
    waits_first: bool, expected: list[float]
) -> None:
    by_rank = [[step(0.1, loading_s=seconds)] for seconds in (0.1, 0.7)]
    work = work_of(workers_of(Topology.from_degrees(s=2)), 9, by_rank, waits_first)
    assert work is not None
    assert work.loading_s is not None
    assert work.loading_s.tolist() == [expected]


def test_ranks_that_differ_in_t_only_share_a_replica() -> None:
    workers = workers_of(Topology.from_degrees(d=2, t=2))
    assert [worker.replica for worker in workers] == [0, 0, 1, 1]
