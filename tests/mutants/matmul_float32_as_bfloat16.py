"""Precision downgrade: float32 arguments are multiplied as bfloat16."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.MATMUL

WORKLOAD = small_workload("matmul", "float32")


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        x, w = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, w))
        return (x @ w.T).astype(workload.dtype("x"))

    return matmul
