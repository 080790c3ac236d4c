"""C3, the Consensus Collective: the comparison rules (Algorithm 1).

The rules are pure: every peer applies the same one to the same gathered evidence, so there is no
coordinator. Gathering is `evidence.exchange`'s work.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from scout_core.decision.evidence import Missing, is_healthy_duration, kind_of
from scout_core.errors import ScoutError


class Status(enum.Enum):
    """Three, not two: "no outlier" must not mean both "healthy" and "cannot tell"."""

    AGREE = "agree"  # all peers did the same
    ATTRIBUTED = "attributed"  # a strict majority did the same; the outliers did not
    INCONCLUSIVE = "inconclusive"  # peers differ, or are too few, and nobody can be blamed


@dataclass(frozen=True)
class Verdict:
    """What one comparison says. The outliers are always a strict minority of the group."""

    status: Status
    outliers: frozenset[int] = frozenset()
    """Positions in the peer group, not global ranks."""
    reason: str = ""
    """Why nobody can be blamed: set when INCONCLUSIVE, empty otherwise."""
    comparable: bool = True
    """False when the peers' values are of different kinds: different work, never called sdc."""

    def __post_init__(self) -> None:
        assert bool(self.outliers) == (self.status is Status.ATTRIBUTED)


def exact(evidence: Sequence[Hashable]) -> Verdict:
    """Flag the peers that differ from the strict majority (Algorithm 1, lines 4-9).

    Args:
        evidence: (N,) one value per peer, in peer-group order. Equal means "did the same".
            A `Missing` value counts in N, agrees with nobody and is blamed for nothing.

    A tie is never resolved: with 2 against 2 nobody is blamed (line 6). One peer has nothing to be
    compared with, so it is inconclusive too.

    Raises:
        ScoutError: the group is empty.
    """
    size = _checked_size(evidence)
    present = {i: value for i, value in enumerate(evidence) if not isinstance(value, Missing)}
    kinds = sorted({kind_of(value) for value in present.values()})
    if len(kinds) > 1:
        return _inconclusive(f"peers gave different kinds of evidence: {', '.join(kinds)}", False)
    if size == 1:
        return _inconclusive("a group of 1 has nothing to compare with")
    if not present:
        return _inconclusive("no peer gave evidence")
    majority, count = Counter(present.values()).most_common(1)[0]
    if 2 * count <= size:
        return _inconclusive(f"no strict majority: {count} of {size} agree at most")
    outliers = frozenset(i for i, value in present.items() if value != majority)
    if outliers:
        return Verdict(Status.ATTRIBUTED, outliers)
    if len(present) < size:
        return _inconclusive(f"{size - len(present)} of {size} peers gave no evidence")
    return Verdict(Status.AGREE)


def statistical(durations_s: Sequence[float], kappa: float = 3.5) -> Verdict:
    """Flag the peers further than kappa robust scales from the median (Algorithm 1, lines 10-15).

    This is the paper's rule as written, kept for comparison: at N = 3..8 it flags healthy groups
    in about half of all checks. What names a rank is `straggler.StragglerRule`.

    Args:
        durations_s: (N,) seconds, one per peer, in peer-group order. A duration that is not finite
            or negative is an outlier by itself and does not enter median and scale.
        kappa: > 0, sensitivity in robust scales.

    Departs from the text in two places: a result that is not a strict minority is inconclusive,
    and so are unequal durations in a group of 2, where no median can take a side.

    Raises:
        ScoutError: the group is empty, or kappa is not positive.
    """
    size = _checked_size(durations_s)
    if not kappa > 0:
        raise ScoutError(
            f"kappa={kappa} of consensus.statistical must be > 0; "
            "3.5 is the usual choice, larger is less sensitive"
        )
    times = np.asarray(durations_s, dtype=np.float64)
    healthy = np.array([is_healthy_duration(float(t)) for t in times])
    if size == 1:
        return _inconclusive("a group of 1 has nothing to compare with")
    flagged = ~healthy
    if healthy.any():
        deviation = np.abs(times[healthy] - np.median(times[healthy]))
        scale = robust_scale(times[healthy])
        flagged[healthy] = (deviation > kappa * scale) & (scale > 0)
        if size == 2 and scale > 0:
            return _inconclusive("2 peers differ and neither has a majority")
    outliers = frozenset(int(i) for i in np.flatnonzero(flagged))
    if 2 * len(outliers) >= size:
        return _inconclusive(f"{len(outliers)} of {size} durations stand out: no strict majority")
    return Verdict(Status.ATTRIBUTED, outliers) if outliers else Verdict(Status.AGREE)


def robust_scale(values: np.ndarray) -> float:
    """Return the median absolute deviation; if 0 the inter-quartile range; if 0 range / 4.

    The deviation is 0 when over half of the values are equal. Quartiles are then values that occur,
    because interpolating between equals and one outlier would widen the scale that shows it; and
    a quarter of the range, the usual estimate of a standard deviation, keeps a lone outlier beyond
    kappa < 4 scales, which half of it could not.
    """
    mad = float(np.median(np.abs(values - np.median(values))))
    if mad > 0:
        return mad
    low, high = np.quantile(values, [0.25, 0.75], method="lower")
    return float(high - low) or float(np.ptp(values)) / 4


def _checked_size(evidence: Sequence[object]) -> int:
    if not len(evidence):
        raise ScoutError("an empty peer group cannot be compared; pass one value per peer")
    return len(evidence)


def _inconclusive(reason: str, comparable: bool = True) -> Verdict:
    return Verdict(Status.INCONCLUSIVE, reason=reason, comparable=comparable)
