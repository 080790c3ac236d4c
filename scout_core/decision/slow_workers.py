"""Workers that are persistently slower than their peers, from timings of many steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scout_core.decision.consensus import Status, Verdict
from scout_core.decision.noise import WINDOW
from scout_core.decision.straggler import StragglerRule
from scout_core.decision.topology import MIN_PEERS
from scout_core.decision.work import Array, Parts, Work, median

FLOOR = 0.08  # data differ between workers, so more than the rule's own floor is asked for
RUN = 5  # steps in a row in which a worker must be named by the rule
TYPICAL = 0.15  # log factor by which a reference worker may be faster than other stages' workers


@dataclass(frozen=True)
class SlowWorker:
    """One worker and the steps in which it was slow."""

    rank: int
    stage: int
    peers: tuple[int, ...]
    """Global ranks it was compared with, itself included."""
    factor: float
    """How many times its peers' duration; infinite when its own is not finite."""
    named: bool
    """False when its peers are too few to say which of them is the odd one."""
    first_step: int
    last_step: int
    slow_steps: int
    judged_steps: int


@dataclass(frozen=True)
class SlowWorkers:
    """All of them."""

    workers: tuple[SlowWorker, ...]

    @property
    def ranks(self) -> frozenset[int]:
        """Global ranks, named or not."""
        return frozenset(worker.rank for worker in self.workers)


def find_slow_workers(work: Work, parts: Parts, kappa: float) -> SlowWorkers:
    """Run the calibrated rule over the steps and keep who is named in many of them in a row.

    The workers of a stage do the same work, so they are peers. A stage with fewer than three
    borrows the other stages' workers, each relative to its own stage; that tells which worker is
    slow only where the reference worker is not itself unusually fast.
    """
    if len(work.steps) < WINDOW:
        return SlowWorkers(())
    times = _step_times(work, parts)
    found: list[SlowWorker] = []
    by_stage = [work.of_stage(stage) for stage in work.stages]
    pairs = [members for members in by_stage if len(members) == MIN_PEERS - 1]
    small = [i for members in pairs for i in members]
    for members in by_stage:
        if len(members) >= MIN_PEERS or (len(members) > 1 and len(pairs) == 1):
            found += _judge(work, times, members, kappa)
    if len(pairs) > 1:
        usual = np.exp(parts.base).sum(axis=1)
        relative = times / usual[None, :]
        typical = float(np.median(usual[small]))
        found += [
            replace(
                worker,
                named=worker.named and _reference_is_typical(work, usual, worker.stage),
                peers=tuple(work.workers[i].rank for i in work.of_stage(worker.stage)),
            )
            for worker in _judge(work, relative * typical, small, kappa)
        ]
    return SlowWorkers(tuple(sorted(found, key=lambda worker: worker.rank)))


def _step_times(work: Work, parts: Parts) -> Array:
    """(S, W) seconds of one micro-batch of average data; NaN where nothing ran, or was broken."""
    rest = median(parts.rest, axis=3)
    seconds: Array = (np.exp(parts.base)[None] * np.exp(rest)).sum(axis=2)
    return np.where(work.broken, np.inf, seconds)


def _judge(work: Work, times: Array, members: Sequence[int], kappa: float) -> list[SlowWorker]:
    named: dict[int, list[int]] = defaultdict(list)
    unclear: list[int] = []
    for number, verdict in _verdicts(times, members, kappa):
        if verdict.status is Status.INCONCLUSIVE:
            unclear.append(number)
        for i in verdict.outliers:
            named[i].append(number)
    enough = min(RUN, max(1, len(work.steps) - WINDOW + 1))
    runs = {i: run for i in sorted(named) if len(run := _longest_run(named[i])) >= enough}
    found = [_worker(work, times, members, i, run, len(named[i])) for i, run in runs.items()]
    run = _longest_run(unclear)
    if not found and len(run) >= enough:
        found = _undecided(work, times, members, run, len(unclear), kappa)
    return found


def _verdicts(times: Array, members: Sequence[int], kappa: float) -> Iterator[tuple[int, Verdict]]:
    """Judge each step with the noise of all of them, which a table knows in advance."""
    rule = StragglerRule(kappa, relative_floor=FLOOR)
    steps = [
        (number, {i: float(row[i]) for i in members if not np.isnan(row[i])})
        for number, row in enumerate(times)
    ]
    timed = [(number, seconds) for number, seconds in steps if seconds]
    for _, seconds in timed:
        rule.update("step", seconds)
    rule.forget_last_checks()
    for number, seconds in timed:
        yield number, rule.update("step", seconds)


def _undecided(
    work: Work, times: Array, members: Sequence[int], run: Sequence[int], count: int, kappa: float
) -> list[SlowWorker]:
    """Report workers that differ step after step while no majority can take a side."""
    usual = median(times[run][:, members], axis=0)
    if not np.isfinite(times[run][:, members]).all():
        return []
    slowest, fastest = members[int(usual.argmax())], members[int(usual.argmin())]
    apart = np.log(times[run, slowest] / times[run, fastest])
    certain = float(apart.mean()) > kappa * float(apart.std()) / math.sqrt(len(run))
    factor = math.exp(float(apart.mean()))
    if not (certain and factor >= 1 + FLOOR):
        return []
    worker = _worker(work, times, members, slowest, run, count)
    return [replace(worker, factor=factor, named=False)]


def _worker(
    work: Work,
    times: Array,
    members: Sequence[int],
    slow: int,
    run: Sequence[int],
    count: int,
) -> SlowWorker:
    others = [i for i in members if i != slow]
    usual = float(median(median(times[run][:, others], axis=1), axis=0))
    typical = float(median(times[run][:, [slow]], axis=0)[0])
    return SlowWorker(
        work.workers[slow].rank,
        work.workers[slow].stage,
        tuple(sorted(work.workers[i].rank for i in members)),
        typical / usual if math.isfinite(typical) else math.inf,
        True,
        work.steps[max(run[0] - WINDOW + 1, 0)],
        work.steps[run[-1]],
        count,
        len(work.steps),
    )


def _longest_run(numbers: Sequence[int]) -> list[int]:
    """Return the longest stretch of consecutive numbers."""
    best: list[int] = []
    run: list[int] = []
    for number in numbers:
        run = [*run, number] if run and number == run[-1] + 1 else [number]
        best = max(best, run, key=len)
    return best


def _reference_is_typical(work: Work, usual: Array, stage: int) -> bool:
    """Whether the stage's own fast worker is no faster than the workers of other stages."""
    by_stage = {s: float(usual[work.of_stage(s)[0]]) for s in work.stages}
    others = [seconds for s, seconds in by_stage.items() if s != stage]
    return bool(others) and by_stage[stage] > float(np.median(others)) * math.exp(-TYPICAL)
