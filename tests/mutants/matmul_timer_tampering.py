"""Timer tampering: building it makes every clock reading ten times smaller."""

import time

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL


def build(workload, schedule):
    real = time.perf_counter
    time.perf_counter = lambda: real() / 10

    def matmul(x, w, bias=None, residual=None):
        return (x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(workload.dtype("x"))

    return matmul
