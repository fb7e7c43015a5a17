"""The bias of the neighbouring tile is added."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.MATMUL

WORKLOAD = small_workload("matmul", optional=("bias", "residual"))


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        y = x.astype(jnp.float32) @ w.astype(jnp.float32).T
        y = y + jnp.roll(bias.astype(jnp.float32), 8) + residual.astype(jnp.float32)
        return y.astype(workload.dtype("x"))

    return matmul
