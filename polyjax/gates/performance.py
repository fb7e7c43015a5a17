"""The performance gate: is a candidate faster than the incumbent, beyond this machine's noise?

Candidate and incumbent run alternately on equal batches; a pair gives log(candidate / incumbent).
Decisions are watched after every pair, so the interval must hold at all times at once: the
asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Annals of
Statistics 2024, theorem 2.2). What an A/A run shows between two copies of the incumbent is the
floor under which no difference is believed.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np

MIN_PAIRS = 10
TIGHTEST_AT_PAIRS = 40  # the number of pairs at which the sequence is tuned to be narrowest


class Decision(enum.StrEnum):
    FASTER = "faster"
    NOT_FASTER = "not_faster"
    SLOWER = "slower"
    UNDECIDED = "undecided"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A paired comparison so far; ratios are candidate over incumbent time, below 1 is faster."""

    decision: Decision
    ratio: float
    low: float
    high: float
    pairs: int
    floor: float


def log_ratios(candidate_us: Sequence[float], incumbent_us: Sequence[float]) -> np.ndarray:
    """Returns log(candidate / incumbent) per pair. Raises ValueError on incomplete or bad pairs."""
    ours, theirs = np.asarray(candidate_us, float), np.asarray(incumbent_us, float)
    if ours.shape != theirs.shape:
        raise ValueError(f"pairs are incomplete: {ours.size} and {theirs.size} samples")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise ValueError("a sample is not finite")
    if (ours <= 0).any() or (theirs <= 0).any():
        raise ValueError("a sample is not positive")
    return np.log(ours / theirs)


def confidence_sequence(values: np.ndarray, alpha: float = 0.05) -> tuple[float, float]:
    """Returns the (1 - alpha) interval of the mean that holds at every length of `values`."""
    n = values.size
    if n < 2:
        return -math.inf, math.inf
    # Theorem 2.2 with rho tuned by their equation (10) to be narrowest at TIGHTEST_AT_PAIRS.
    log_alpha = -math.log(alpha)
    rho2 = (2 * log_alpha + math.log(2 * log_alpha + 1)) / TIGHTEST_AT_PAIRS
    spread = float(np.var(values, ddof=1))
    width = 2 * (n * rho2 + 1) / (n * n * rho2) * math.log(math.sqrt(n * rho2 + 1) / alpha)
    half = math.sqrt(spread * width)
    mean = float(values.mean())
    return mean - half, mean + half


def noise_floor(first_us: Sequence[float], second_us: Sequence[float]) -> float:
    """Returns the relative difference that an A/A run cannot exclude, from its paired samples."""
    low, high = confidence_sequence(log_ratios(first_us, second_us))
    return math.expm1(max(abs(low), abs(high)))


def compare(
    candidate_us: Sequence[float],
    incumbent_us: Sequence[float],
    floor: float,
    max_pairs: int = 400,
    alpha: float = 0.05,
) -> Comparison:
    """Returns the decision that the pairs so far allow; valid whenever it is asked.

    FASTER: the whole interval lies below -floor. SLOWER: the whole interval lies above +floor.
    NOT_FASTER: the interval cannot reach below -floor any more, or `max_pairs` are used up.
    """
    values = log_ratios(candidate_us, incumbent_us)
    low, high = confidence_sequence(values, alpha)
    margin = math.log1p(floor)
    decision = Decision.UNDECIDED
    if values.size >= MIN_PAIRS:
        if high < -margin:
            decision = Decision.FASTER
        elif low > margin:
            decision = Decision.SLOWER
        elif low > -margin or values.size >= max_pairs:
            decision = Decision.NOT_FASTER
    ratio = math.exp(float(values.mean())) if values.size else 1.0
    return Comparison(decision, ratio, math.exp(low), math.exp(high), values.size, floor)


def promotable(by_bucket: Mapping[str, Comparison]) -> tuple[bool, str]:
    """Returns whether a candidate may be promoted, and why: faster somewhere, slower nowhere.

    A bucket that is still undecided forbids promotion.
    """
    slower = [name for name, c in by_bucket.items() if c.decision is Decision.SLOWER]
    open_ = [name for name, c in by_bucket.items() if c.decision is Decision.UNDECIDED]
    faster = [name for name, c in by_bucket.items() if c.decision is Decision.FASTER]
    if slower:
        return False, f"slower on {', '.join(slower)}"
    if open_:
        return False, f"undecided on {', '.join(open_)}"
    if not faster:
        return False, "faster nowhere beyond the noise floor"
    return True, f"faster on {', '.join(faster)}, slower nowhere"
