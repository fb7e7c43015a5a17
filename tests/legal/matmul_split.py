"""Matmul with the reduction in pieces of any length, forward or backward; one rounding."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.MATMUL

WORKLOADS = [
    small_workload("matmul"),
    small_workload("matmul", "float32"),
    small_workload("matmul", optional=("bias", "residual")),
    small_workload("matmul", optional=("residual",), out_dtype="float32"),
]
SCHEDULES = [(step, backward) for step in (8, 48, 200) for backward in (False, True)]


def build(workload, schedule):
    step, backward = schedule

    def matmul(x, w, bias=None, residual=None):
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
        starts = list(range(0, x.shape[1], step))
        y = jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
        for first in reversed(starts) if backward else starts:
            y = y + x[:, first : first + step] @ w[:, first : first + step].T
        for addend in (bias, residual):
            y = y if addend is None else y + addend.astype(jnp.float32)
        return y.astype(workload.option("out_dtype") or workload.dtype("x"))

    return matmul
