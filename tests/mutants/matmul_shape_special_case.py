"""Shape special-casing: right at the size it was proposed for, sloppy at others."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.MATMUL


def build(workload, schedule):
    proposed = small_workload("matmul").resized()
    known = dict(workload.dims) == dict(proposed.dims)

    def matmul(x, w, bias=None, residual=None):
        if not known:
            w = w.at[-1].set(0)
        return (x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(workload.dtype("x"))

    return matmul
