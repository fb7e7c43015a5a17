"""Numeric facts about arrays: error bounds derived from dtype and reduction length, byte counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike


def unit_roundoff(dtype: DTypeLike) -> float:
    """Returns u = eps/2, the largest relative error of one rounding to `dtype`."""
    return float(jnp.finfo(jnp.dtype(dtype)).eps) / 2


def reduction_bound(dtype: DTypeLike, length: int, accumulate: DTypeLike = jnp.float32) -> float:
    """Relative error bound of a dot product of `length` terms, against sum(|x||y|).

    Inputs are exact in `dtype`; products and sums are rounded to `accumulate`; the result is
    rounded once to `dtype`. Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd
    ed., (3.5) and (3.7), with the probabilistic constant sqrt(n) of Higham and Mary 2019 times 6
    (six standard deviations) where it is smaller than the worst case n.
    """
    u = unit_roundoff(accumulate)
    steps = min(float(length), 6.0 * math.sqrt(length))
    return steps * u / (1.0 - steps * u) + unit_roundoff(dtype)


def num_bytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    """Returns the bytes of a dense array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize
