"""A tile of the output is never written: it keeps zeros."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        y = (x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(workload.dtype("x"))
        whole = max(y.shape[1] // 64 * 64, 1)
        return jnp.zeros_like(y).at[:, :whole].set(y[:, :whole])

    return matmul
