"""Why a job is slow: a slow worker, or a cause in which no rank is at fault.

A slow worker is a straggler. Uneven stages, uneven data, pauses of the interpreter and waiting for
data slow a job down as well, and the rank that happens to be last is then not at fault.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scout_core.decision.baseline import SlowdownRule
from scout_core.decision.slow_workers import SlowWorkers, find_slow_workers
from scout_core.decision.work import (
    EXPLAINED,
    Array,
    Parts,
    Work,
    common_to_operations,
    correlation,
    median,
    offsets,
    split,
)

UNEVEN = 1.10  # factor from which a stage or the data counts as uneven
VARIED = 0.15  # variation of micro-batches in a step from which it counts as uneven
ROTATING = 1.20  # factor from which an uneven step without a recorded cause is reported
STALLED = 0.02  # share of the step from which pauses count
LOADING = 0.05  # share of the step from which waiting for data counts
NOISY = 9.0  # median deviations (six scales) of which a pause must stand out
SPIKE = 1.3  # a paused operation takes at least this many times its usual time
SHORTEST_PAUSE_S = 0.02
EVENTS = 3  # pauses that make a pattern
ALWAYS = 0.8  # share of the steps from which "the same replica" is said
DRIFT = 0.05  # a job-wide rise below this fraction is not reported from a table
SHORTEST_S = 1e-9  # no division by a step of no duration
SUSTAINED = 5  # steps a job-wide rise must last


class Cause(enum.Enum):
    """What makes the job slow."""

    STRAGGLER = "straggler"  # a worker is slower than its peers at the same work
    STAGE = "stage"  # a pipeline stage has more work than the others
    DATA = "data"  # replicas or micro-batches have uneven work
    PAUSES = "pauses"  # CPU-side pauses on changing ranks
    LOADING = "loading"  # ranks wait for data
    ROTATING = "rotating"  # changing ranks are last, and nothing recorded tells why
    SLOWDOWN = "slowdown"  # everybody became slower


@dataclass(frozen=True)
class Explanation:
    """One cause. Only STRAGGLER has culprits."""

    cause: Cause
    factor: float
    """How many times the usual duration it costs where it strikes."""
    ranks: tuple[int, ...] = ()
    """Global ranks at fault (STRAGGLER), else empty."""
    peers: tuple[int, ...] = ()
    """Global ranks that were compared."""
    stages: tuple[int, ...] = ()
    first_step: int = -1
    last_step: int = -1
    certain: bool = True
    """False: the evidence cannot decide between this and a slow rank, and names nobody."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""


def explain(work: Work, kappa: float = 5.0) -> tuple[Explanation, ...]:
    """Return every cause that the durations show, stragglers first; empty when all is well.

    Args:
        work: what was timed; at least three steps, or nobody is judged.
        kappa: sensitivity of the straggler rule.
    """
    parts = split(work)
    slow = find_slow_workers(work, parts, kappa)
    found = [*_stragglers(slow), *_stages(work, parts, slow), *_data(work, parts, slow)]
    found += [*_pauses(work, parts, slow), *_loading(work), *_slowdown(work, parts)]
    causes = {explanation.cause for explanation in found}
    known = causes & {Cause.PAUSES, Cause.LOADING}
    return tuple(e for e in found if e.cause is not Cause.ROTATING or not known)


def _stragglers(slow: SlowWorkers) -> list[Explanation]:
    return [
        Explanation(
            Cause.STRAGGLER,
            worker.factor,
            ranks=(worker.rank,) if worker.named else (),
            peers=worker.peers,
            stages=(worker.stage,),
            first_step=worker.first_step,
            last_step=worker.last_step,
            certain=worker.named,
            evidence={"slow_steps": worker.slow_steps, "judged_steps": worker.judged_steps},
        )
        for worker in slow.workers
    ]


def _stages(work: Work, parts: Parts, slow: SlowWorkers) -> list[Explanation]:
    """Stages in which every healthy worker needs longer than the other stages' workers."""
    if len(work.stages) < 2:
        return []
    healthy = [i for i, w in enumerate(work.workers) if w.rank not in slow.ranks]
    usual = np.exp(parts.base + offsets(parts)).sum(axis=1)
    by_stage = {
        stage: [usual[i] for i in healthy if work.workers[i].stage == stage]
        for stage in work.stages
    }
    fastest = {stage: min(those) for stage, those in by_stage.items() if those}
    found = {}
    for stage, quickest in fastest.items():
        others = float(np.median([those for s, those in fastest.items() if s != stage]))
        if quickest / others >= UNEVEN:
            found[stage] = float(np.median(by_stage[stage])) / others
    if not found:
        return []
    evidence = {
        "factor_by_stage": {str(stage): round(f, 4) for stage, f in found.items()},
        "seconds_by_stage": {str(stage): round(float(f), 6) for stage, f in fastest.items()},
        "stages": list(work.stages),
        "workers_per_stage": min(len(work.of_stage(stage)) for stage in found),
    }
    certain = min(len(work.of_stage(stage)) for stage in found) > 1
    peers = tuple(sorted(w.rank for w in work.workers if w.stage in found))
    stages, factor = tuple(found), max(found.values())
    return [
        Explanation(
            Cause.STAGE, factor, peers=peers, stages=stages, certain=certain, evidence=evidence
        )
    ]


def _data(work: Work, parts: Parts, slow: SlowWorkers) -> list[Explanation]:
    """Replicas that have uneven work in a step, or micro-batches that differ in a step."""
    data, source = parts.data, parts.source
    if not source:
        return _rotating(work, parts, slow)
    ran = np.isfinite(work.seconds).any(axis=2)
    factors = np.where(ran, np.exp(data), np.nan)
    load = np.stack([_load(factors[:, work.of_replica(r)]) for r in work.replicas], axis=1)
    spread, last = _spread(load)
    deviations = [float(np.nanstd(step) / np.nanmean(step)) for step in factors]
    variation = float(np.median(deviations))
    if spread < UNEVEN and variation < VARIED:
        return []
    replica, share = last.most_common(1)[0]
    always = len(work.replicas) > 1 and share >= ALWAYS * len(work.steps) and spread >= UNEVEN
    evidence = {
        "explained_by": source,
        "spread_of_replicas": round(spread, 4),
        "variation_of_micro_batches": round(variation, 4),
        "last_replica_in_steps": {str(work.replicas[r]): n for r, n in sorted(last.items())},
        "always_replica": work.replicas[replica] if always else None,
    }
    return [Explanation(Cause.DATA, max(spread, 1 + variation), evidence=evidence)]


def _rotating(work: Work, parts: Parts, slow: SlowWorkers) -> list[Explanation]:
    """Without stages and token counts: workers that take turns in being last."""
    healthy = [i for i, w in enumerate(work.workers) if w.rank not in slow.ranks]
    if len(healthy) < 2:
        return []
    rest = (parts.rest - offsets(parts)[None, :, :, None])[:, healthy]
    shares = np.exp(parts.base) / np.exp(parts.base).sum(axis=1, keepdims=True)
    usual = shares[None, healthy, :, None]
    cells = np.where(np.isfinite(rest), usual * np.exp(rest), np.nan)
    spread, last = _spread(np.nansum(cells, axis=(2, 3)))
    alike = correlation(rest[:, :, 0], rest[:, :, 1]) if len(work.operations) > 1 else 0.0
    cause = Cause.DATA if alike >= EXPLAINED else Cause.ROTATING
    if spread < (UNEVEN if cause is Cause.DATA else ROTATING):
        return []
    ranks = [work.workers[healthy[i]].rank for i, _ in last.most_common()]
    evidence = {
        "explained_by": "operations" if cause is Cause.DATA else "",
        "spread_of_ranks": round(spread, 4),
        "ranks_that_were_last": ranks[:8],
        "correlation_of_operations": round(alike, 4),
    }
    return [Explanation(cause, spread, evidence=evidence)]


def _pauses(work: Work, parts: Parts, slow: SlowWorkers) -> list[Explanation]:
    """Measured pauses of the interpreter; else single operations that stop on changing ranks."""
    step_s = _wall_seconds(work, _step_seconds(work, parts))
    if work.pauses_s is not None and np.nansum(work.pauses_s) > 0:
        paused, measured = np.nan_to_num(work.pauses_s), True
        forward = None
    else:
        paused, forward = _spikes(work, parts, slow)
        measured = False
    share = float(np.mean(paused.max(axis=1) / step_s))
    events = Counter(work.workers[i].rank for i in np.argwhere(paused > 0)[:, 1])
    if share < STALLED or sum(events.values()) < EVENTS:
        return []
    evidence = {
        "measured": measured,
        "share_of_step": round(share, 4),
        "pauses_by_rank": {str(rank): n for rank, n in events.most_common(8)},
        "ranks": len(events),
        "longest_s": round(float(paused.max()), 6),
        "share_in_forward": forward,
    }
    return [Explanation(Cause.PAUSES, 1 + share, evidence=evidence)]


def _spikes(work: Work, parts: Parts, slow: SlowWorkers) -> tuple[Array, float | None]:
    """(S, W) seconds lost in single operations that took far too long, and the forward share."""
    if len(work.operations) == 1 and not parts.source:
        return np.zeros(work.seconds.shape[:2]), None  # uneven data would look the same
    rest = parts.rest
    if len(work.operations) > 1:
        rest = rest - np.maximum(common_to_operations(parts), 0)[:, :, None]
    usual = np.exp(parts.base[None, :, :, None] + parts.data[:, :, None])
    lost = np.nan_to_num(usual * (np.exp(rest) - 1))
    scatter = float(median(np.abs(parts.rest).reshape(1, -1), axis=1)[0])
    spike = max(float(np.log(SPIKE)), NOISY * scatter)
    lost[(np.nan_to_num(rest) < spike) | (lost < SHORTEST_PAUSE_S)] = 0
    for i, worker in enumerate(work.workers):
        if worker.rank in slow.ranks:
            lost[:, i] = 0
    forward = [i for i, name in enumerate(work.operations) if "forward" in name]
    if not forward or not lost.any():
        return lost.sum(axis=(2, 3)), None
    return lost.sum(axis=(2, 3)), round(float(lost[:, :, forward].sum() / lost.sum()), 4)


def _loading(work: Work) -> list[Explanation]:
    """Steps in which ranks wait for data for a noticeable time."""
    if work.loading_s is None:
        return []
    waits = np.nan_to_num(work.loading_s)
    step_s = _wall_seconds(work, np.nansum(work.seconds, axis=(2, 3)).max(axis=1))
    share = float(np.median(waits.max(axis=1) / step_s))
    if share < LOADING:
        return []
    last = Counter(work.workers[int(i)].rank for i in waits.argmax(axis=1))
    evidence = {
        "share_of_step": round(share, 4),
        "longest_s": round(float(waits.max()), 6),
        "last_rank_in_steps": {str(rank): n for rank, n in last.most_common(8)},
    }
    return [Explanation(Cause.LOADING, 1 + share, evidence=evidence)]


def _slowdown(work: Work, parts: Parts) -> list[Explanation]:
    """Everybody slower than in the first steps."""
    rule = SlowdownRule(dead_zone=DRIFT)
    readings = [rule.update("job", seconds) for seconds in _typical_seconds(work, parts)]
    slow = [i for i, reading in enumerate(readings) if reading.slow]
    if len(slow) < SUSTAINED or readings[-1].factor < UNEVEN:
        return []
    first = slow[0] - readings[slow[0]].checks + 1
    return [
        Explanation(
            Cause.SLOWDOWN,
            readings[-1].factor,
            first_step=work.steps[max(first, 0)],
            last_step=work.steps[slow[-1]],
            evidence={"slow_steps": len(slow)},
        )
    ]


def _load(factors: Array) -> Array:
    """(S,) work of one replica: (S, N, M) factors summed over micro-batches, one stage's worth."""
    return median(np.nansum(factors, axis=2), axis=1)


def _spread(load: Array) -> tuple[float, Counter[int]]:
    """Median over steps of the largest load over the mean one, and who was last how often."""
    mean = np.maximum(load.mean(axis=1), SHORTEST_S)
    last = Counter(int(i) for i in load.argmax(axis=1))
    return float(np.median(load.max(axis=1) / mean)), last


def _wall_seconds(work: Work, busiest: Array) -> Array:
    """(S,) duration of the steps; without it, seconds of the busiest worker."""
    seconds = busiest if work.wall_s is None else median(work.wall_s, axis=1)
    return np.maximum(seconds, SHORTEST_S)


def _step_seconds(work: Work, parts: Parts) -> Array:
    """(S,) compute seconds of the busiest worker when nothing is wrong."""
    ran = np.isfinite(work.seconds)
    usual = np.exp(parts.base[None, :, :, None] + parts.data[:, :, None])
    seconds: Array = np.where(ran, usual, 0).sum(axis=(2, 3)).max(axis=1)
    return np.maximum(seconds, SHORTEST_S)


def _typical_seconds(work: Work, parts: Parts) -> list[float]:
    """(S,) compute seconds of the median worker relative to its stage, per unit of work."""
    data = 0 if parts.source == "tokens" else parts.data[:, :, None]
    by_step = median((parts.rest + data).reshape(len(work.steps), -1), axis=1)
    return [float(value) for value in np.exp(np.nan_to_num(by_step))]
