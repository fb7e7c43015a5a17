"""Confidence intervals of quality scores, and whether two of them differ beyond noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Interval:
    """A point estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def proportion(successes: float, trials: int) -> Interval:
    """Returns the Wilson score interval of a success rate (Wilson 1927; z = 1.96).

    `successes` may be fractional (graded scores). Raises ValueError without trials.
    """
    if trials < 1:
        raise ValueError("a proportion needs at least one trial")
    z, p = 1.959964, successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def bootstrap(
    samples: Sequence[float],
    statistic: Callable[[np.ndarray], float] = lambda x: float(np.mean(x)),
    seed: int = 0,
) -> Interval:
    """Returns the percentile bootstrap interval of a statistic of independent samples."""
    values = np.asarray(samples, dtype=float)
    if values.size == 0:
        raise ValueError("a bootstrap needs at least one sample")
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    estimates = np.asarray([statistic(values[row]) for row in draws])
    low, high = np.percentile(estimates, [2.5, 97.5])
    return Interval(statistic(values), float(low), float(high))


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Interval:
    """Returns the bootstrap interval of mean(ours - theirs) over the same items in one order."""
    if len(ours) != len(theirs):
        raise ValueError(f"paired samples differ in length: {len(ours)} and {len(theirs)}")
    return bootstrap(np.subtract(ours, theirs).tolist(), seed=seed)


def differs(difference: Interval) -> bool:
    """Whether a difference's interval leaves out zero."""
    return difference.low > 0 or difference.high < 0
