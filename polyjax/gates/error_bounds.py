"""Arithmetic on numbers with an error bar: what any correct implementation may differ by.

An `Approx` is a float64 value and an absolute error that two correct implementations cannot exceed
between them, the one judged and the float32 reference it is judged against. Every primitive below
derives its error from the dtype, the reduction length and the errors that come in; nothing is
picked. Rounding errors of different elements are independent, so a sum of n of them is bounded by
the smaller of the worst case and six standard deviations (Higham and Mary 2019, A new approach to
probabilistic rounding error analysis, theorem 2.4; six as in `polyjax.core.arrays`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jax.typing import DTypeLike
from scipy import special

from polyjax.core.arrays import reduction_bound, unit_roundoff

SIGMAS = 6.0
U32 = unit_roundoff("float32")
# Relative error of a hardware exp2, log2, rsqrt, division or sine in float32: ex2.approx and
# rsqrt.approx err by up to 2^-22 (PTX ISA 8.5, section 9.7.3); one more bit for the scaling around.
TRANSCENDENTAL = 2.0**-21
SMALLEST = float(np.finfo(np.float32).tiny)  # flushing subnormals to zero is legal


@dataclasses.dataclass(frozen=True)
class Approx:
    """`value` and `error` are float64 arrays of one shape; a NaN value has no error to speak of."""

    value: np.ndarray
    error: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def map(self, rearrange: Callable[[np.ndarray], np.ndarray]) -> Approx:
        """Reshapes, slices or permutes value and error alike."""
        return Approx(rearrange(self.value), rearrange(self.error))


def exact(array: object) -> Approx:
    """An input: the same number for everyone."""
    value = np.asarray(array).astype(np.float64)
    return Approx(value, np.zeros_like(value))


def rounded(a: Approx, dtype: DTypeLike) -> Approx:
    """Rounds to `dtype` in one implementation and, perhaps, not in the other."""
    error = a.error + unit_roundoff(dtype) * (np.abs(a.value) + a.error) + SMALLEST
    return Approx(a.value, error)


def add(a: Approx, b: Approx) -> Approx:
    """a + b in float32, rounded once by each implementation."""
    value = a.value + b.value
    return Approx(value, a.error + b.error + 2 * U32 * (np.abs(a.value) + np.abs(b.value)))


def multiply(a: Approx, b: Approx) -> Approx:
    """a * b in float32, elementwise."""
    value = a.value * b.value
    carried = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
    return Approx(value, carried + 2 * U32 * np.abs(value))


def dot(a: Approx, b: Approx, *addends: Approx) -> Approx:
    """Products over the last axis, summed in float32: a [...,M,K], b [...,N,K] -> [...,M,N].

    `addends` (bias, residual) are terms of the same sum: an implementation may start its
    accumulator with them, so that every partial sum is as large as they are.
    """
    columns = np.swapaxes(b.value, -1, -2)
    sizes = np.abs(a.value), np.abs(columns)
    value, size = np.matmul(a.value, columns), np.matmul(*sizes)
    error = np.zeros_like(value)
    for addend in addends:
        value, error = value + addend.value, error + addend.error
        size = size + np.abs(addend.value) + addend.error
    # The products of two 24-bit numbers are rounded too: one rounding more than additions.
    error = error + 2 * reduction_bound("float32", a.shape[-1] + 1 + len(addends)) * size
    if a.error.any():
        error = error + _independent(a.error, sizes[1])
    if b.error.any():
        error = error + _independent(sizes[0] + a.error, np.swapaxes(b.error, -1, -2))
    return Approx(value, error + SMALLEST)


def _independent(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Bound of sum over k of a[m,k] * b[k,n] where one factor is an independent error."""
    return np.minimum(np.matmul(a, b), SIGMAS * np.sqrt(np.matmul(a * a, b * b)))


def rms_norm(x: Approx, weight: np.ndarray, eps: float) -> Approx:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, not rounded."""
    weight = np.asarray(weight).astype(np.float64)
    length = x.shape[-1]
    squares = np.sum(x.value**2, axis=-1, keepdims=True)
    scale = 1.0 / np.sqrt(squares / length + eps)
    value = x.value * scale * weight
    # The mean's relative error is halved by the square root; then rsqrt and two products.
    relative = reduction_bound("float32", length + 1) + 2 * TRANSCENDENTAL + 6 * U32
    error = relative * np.abs(value) + np.abs(weight) * scale * x.error
    if x.error.any():
        terms = np.abs(x.value) * x.error
        moved = np.minimum(
            terms.sum(-1, keepdims=True), SIGMAS * np.sqrt((terms**2).sum(-1, keepdims=True))
        )
        error = error + np.abs(value) * moved / (squares + length * eps)
    return Approx(value, error)


def rope(x: Approx, cos_sin: np.ndarray) -> Approx:
    """Rotates the first R dims of x [M,N,H] by cos_sin [M,R], half against half."""
    cos_sin = np.asarray(cos_sin).astype(np.float64)[:, None, :]
    rotary = cos_sin.shape[-1]
    cos, sin = np.split(cos_sin, 2, axis=-1)
    turned = x.map(lambda a: a[..., :rotary])
    first, second = (
        turned.map(lambda a: np.split(a, 2, -1)[0]),
        turned.map(lambda a: np.split(a, 2, -1)[1]),
    )
    c, s = exact(np.broadcast_to(cos, first.shape)), exact(np.broadcast_to(sin, first.shape))
    minus = exact(-s.value)
    halves = (
        add(multiply(first, c), multiply(second, minus)),
        add(multiply(second, c), multiply(first, s)),
    )
    rest = x.map(lambda a: a[..., rotary:])
    return Approx(
        np.concatenate([halves[0].value, halves[1].value, rest.value], -1),
        np.concatenate([halves[0].error, halves[1].error, rest.error], -1),
    )


_BEND = {"silu": 0.5, "gelu": 0.8, "gelu_pytorch_tanh": 0.85}  # max |second derivative|


def activation(x: Approx, name: str) -> Approx:
    """silu or gelu in float32."""
    g = x.value
    if name == "silu":
        inner = special.expit(g)
        value, slope = g * inner, inner * (1 + g * (1 - inner))
    else:  # the tanh form differs from the erf form by less than 5e-4; each has its own value
        value, slope = _gelu(g, name), _gelu_slope(g)
    # exp(-g) errs by |g| roundings of its argument. The sigmoid may be (1 + tanh) / 2 and gelu is
    # 1 + erf: both round at the size of 1, so that errors are relative to |g|, not to the result;
    # and a sigmoid below the smallest normal number may be flushed to 0 before it meets g.
    exponential = (TRANSCENDENTAL + 2 * U32 * (np.abs(g) + 4)) * np.abs(value)
    rounding = exponential + (TRANSCENDENTAL + 4 * U32 + SMALLEST) * np.abs(g)
    flat = 5e-4 if name == "gelu_pytorch_tanh" else 0.0  # slope of the erf form stands in
    error = (np.abs(slope) + flat) * x.error + 0.5 * _BEND[name] * x.error**2
    return Approx(value, error + 2 * rounding)


def _gelu(g: np.ndarray, name: str) -> np.ndarray:
    if name == "gelu":
        return g * special.ndtr(g)
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))


def _gelu_slope(g: np.ndarray) -> np.ndarray:
    return special.ndtr(g) + g * np.exp(-0.5 * g * g) / np.sqrt(2 * np.pi)


def soft_capped(x: Approx, cap: float) -> Approx:
    """cap * tanh(x / cap); the identity without a cap."""
    if not cap:
        return x
    value = cap * np.tanh(x.value / cap)
    return Approx(value, x.error + 2 * (TRANSCENDENTAL + 4 * U32) * np.abs(value) + 2 * U32 * cap)


def softmax_products(
    scores: Approx, mask: np.ndarray, values: Approx, weight_dtype: DTypeLike
) -> Approx:
    """softmax(scores where mask) @ values: scores, mask [...,Q,S], values [...,S,H] -> [...,Q,H].

    Weights may be rounded to `weight_dtype` before the product, normalised or not. Rows without a
    visible slot give 0 exactly.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        shown = np.where(mask, scores.value, -np.inf)
        peak = np.max(shown, axis=-1, keepdims=True, initial=-np.inf)
        safe = np.where(np.isfinite(peak) | np.isnan(peak), peak, 0.0)
        weights = np.exp(shown - safe)
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
        # A weight's logarithm moves by its score's error, by the rounding of score - peak (twice:
        # online softmax rescales), by exp itself; and all of it again for the sum it is divided by.
        own = np.where(mask, scores.error, 0.0) + 2 * TRANSCENDENTAL
        own = own + 4 * U32 * (np.abs(np.where(mask, scores.value, 0.0)) + np.abs(safe) + 1)
        own = np.where(weights > 0, own, 0.0)
        common = np.sum(weights * own, -1, keepdims=True) + reduction_bound(
            "float32", mask.shape[-1] + 1
        )
        moved = weights * np.expm1(np.minimum(own + common, 50.0))
        rounding = unit_roundoff(weight_dtype) * weights
        value = np.matmul(weights, values.value)
        size = np.abs(values.value) + values.error
        error = np.matmul(moved, size) + _independent(rounding, size)
        error = error + _independent(weights, values.error)
        error = error + 2 * reduction_bound("float32", mask.shape[-1] + 1) * np.matmul(
            weights, size
        )
    seen = mask.any(-1, keepdims=True)
    return Approx(np.where(seen, value, 0.0), np.where(seen, error + SMALLEST, 0.0))
