"""A platform's form of an op computes what the reference computes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.compiler.xla_forms import PlatformOps, cpu_paged_attention
from polyjax.core import ops, reference
from polyjax.core.arrays import reduction_bound
from polyjax.core.op import REFERENCE

PAGES, PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 40, 8, 2, 6, 16


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (11, 0.0), (0, 5.0)])
def test_attention(tokens: int, window: int, soft_cap: float) -> None:
    rng = np.random.default_rng(tokens + window)
    contexts = np.array([tokens, 9, 16, 17, 128, 200], np.int32)
    queries = np.array([tokens, 1, min(tokens, 3), 0, tokens, tokens], np.int32)
    kv = rng.normal(size=(PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM)).astype(np.float32)
    q = rng.normal(size=(6, tokens, HEADS, HEAD_DIM)).astype(np.float32)
    table = np.array([rng.permutation(np.arange(1, PAGES))[:25] for _ in range(6)], np.int32)
    kv[0] = np.nan  # nobody's page
    table[np.arange(25)[None] * PAGE_SIZE >= contexts[:, None]] = 0
    first = np.maximum(contexts - queries - window + 1, 0) // PAGE_SIZE if window else None
    if first is not None:
        table = np.array([np.roll(row, -n) for row, n in zip(table, first, strict=True)])
    args = [jnp.asarray(array) for array in (q, kv, table, contexts, queries)]

    def call(function: Callable[..., jax.Array]) -> jax.Array:
        scale = HEAD_DIM**-0.5
        return jax.jit(
            lambda *a: function(REFERENCE, *a, first, scale=scale, window=window, soft_cap=soft_cap)
        )(*args)

    wanted, found = call(reference.paged_attention), call(cpu_paged_attention)
    # Scores and outputs are averages of values of at most max|v|; two sums each way.
    bound = 4 * reduction_bound("float32", 200) * float(np.nanmax(np.abs(kv))) * HEAD_DIM
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)
    assert (np.asarray(found)[3] == 0).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_matmul(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 48)), rng.normal(size=(32, 48))
    bias, residual = rng.normal(size=32), rng.normal(size=(rows, 32))
    args = [jnp.asarray(a, jnp.float32) for a in (x, w, bias, residual)]
    found = jax.jit(lambda *a: PlatformOps({}, {}, "cpu")(ops.MATMUL, *a))(*args)
    bound = 2 * reduction_bound("float32", 50) * 50 * float(np.abs(x).max() * np.abs(w).max())
    np.testing.assert_allclose(found, x @ w.T + bias + residual, rtol=0, atol=bound)


def test_other_platforms_use_the_reference() -> None:
    used = PlatformOps({}, {}, "gpu")
    x = jnp.ones((2, 4))
    a = jax.make_jaxpr(lambda: used(ops.MATMUL, x, x, None, None))()
    b = jax.make_jaxpr(lambda: REFERENCE(ops.MATMUL, x, x, None, None))()
    assert str(a) == str(b)
