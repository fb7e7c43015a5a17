"""Candidate absent: it claims to be a Pallas kernel and calls the reference."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL

PALLAS = True


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        return (x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(workload.dtype("x"))

    return matmul
