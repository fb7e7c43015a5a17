"""Bounds hold for every honest order of rounding and are too tight for a coarser one."""

import ml_dtypes
import numpy as np
import pytest

from polyjax.gates import error_bounds as eb
from polyjax.gates.error_bounds import Approx, exact

BF16 = ml_dtypes.bfloat16


def products(rng, rows, depth, columns):
    x = rng.standard_normal((rows, depth)).astype(BF16)
    w = rng.standard_normal((columns, depth)).astype(BF16)
    return x, w


def summed(x, w, order, dtype, block):
    """x @ w.T with blocks of the reduction added in an order, the total kept in a dtype."""
    total = np.zeros((len(x), len(w)), dtype)
    for k in order:
        part = slice(k, k + block)
        product = x[:, part].astype(np.float32) @ w[:, part].astype(np.float32).T
        total = (total.astype(np.float32) + product).astype(dtype)
    return total.astype(np.float64)


@pytest.mark.parametrize("depth", [16, 100, 1000])
def test_a_float32_sum_in_any_order_is_within_the_bound(depth):
    rng = np.random.default_rng(depth)
    x, w = products(rng, 8, depth, 8)
    model = eb.dot(exact(x), exact(w))
    for _ in range(10):
        found = summed(x, w, rng.permutation(depth), np.float32, 1)
        assert (np.abs(found - model.value) <= model.error).all()


def test_a_bfloat16_sum_is_outside_of_it():
    x, w = products(np.random.default_rng(0), 8, 512, 8)
    model = eb.rounded(eb.dot(exact(x), exact(w)), BF16)
    found = summed(x, w, range(0, 512, 64), BF16, 64)
    assert (np.abs(found - model.value) > model.error).any()


def test_an_accumulator_may_start_with_an_addend():
    """A small product is lost bit by bit beside a large bias, and that is legal."""
    rng = np.random.default_rng(1)
    x, w = (1e-6 * rng.standard_normal((4, 300))).astype(np.float32), rng.standard_normal((4, 300))
    w, bias = w.astype(np.float32), np.ones((4, 4), np.float32)
    total = bias.copy()
    for k in range(300):
        total = total + x[:, k : k + 1] * w[:, k]
    model = eb.dot(exact(x), exact(w), exact(bias))
    assert (np.abs(total - model.value) <= model.error).all()
    separately = eb.add(eb.dot(exact(x), exact(w)), exact(bias))
    assert (np.abs(total - separately.value) > separately.error).any()


def test_rounding_adds_half_a_unit_in_the_last_place():
    value = exact(np.array([1.0, -3.0, 1000.0]))
    error = eb.rounded(value, BF16).error
    np.testing.assert_allclose(error, np.abs(value.value) * 2.0**-8, rtol=1e-6)
    unit = np.abs(value.value) * 2.0**-7
    assert (unit > error).all(), "a whole unit must not pass"


def test_errors_of_elements_add_like_independent_ones():
    error = np.full((1, 10_000), 1e-3)
    a = Approx(np.ones((1, 10_000)), error)
    b = exact(np.ones((1, 10_000)))
    assert eb.dot(a, b).error[0, 0] < 6.1 * 1e-3 * 100 + 0.01 * 10_000
    assert eb.dot(a, b).error[0, 0] > 6 * 1e-3 * 100


def test_a_softmax_row_that_sees_nothing_is_exactly_zero():
    scores, values = exact(np.ones((2, 3))), exact(np.ones((3, 4)))
    mask = np.array([[True, True, False], [False, False, False]])
    out = eb.softmax_products(scores, mask, values, np.float32)
    assert (out.value[1] == 0).all() and (out.error[1] == 0).all()
    assert (out.error[0] > 0).all()


def test_extreme_scores_stay_finite():
    scores = exact(np.array([[3e4, -3e4, 2.9e4]]))
    out = eb.softmax_products(scores, np.ones((1, 3), bool), exact(np.eye(3)), np.float32)
    assert np.isfinite(out.value).all() and np.isfinite(out.error).all()
