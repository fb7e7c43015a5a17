"""Precision downgrade: weights pass through float8."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        w = w.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return (x.astype(jnp.float32) @ w.T).astype(workload.dtype("x"))

    return matmul
