"""Matmul that sums products pairwise, elementwise instead of by a dot product."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.MATMUL

WORKLOADS = [small_workload("matmul"), small_workload("matmul", "float32")]


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        terms = x.astype(jnp.float32)[:, None] * w.astype(jnp.float32)[None]
        while terms.shape[-1] > 1:
            if terms.shape[-1] % 2:
                terms = jnp.pad(terms, ((0, 0), (0, 0), (0, 1)))
            half = terms.shape[-1] // 2
            terms = terms[..., :half] + terms[..., half:]
        return terms[..., 0].astype(workload.dtype("x"))

    return matmul
