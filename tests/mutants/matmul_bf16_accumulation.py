"""bfloat16 accumulation: blocks of the reduction are summed in bfloat16."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        total = jnp.zeros((x.shape[0], w.shape[0]), jnp.bfloat16)
        for first in range(0, x.shape[1], 32):
            a, b = (v[:, first : first + 32].astype(jnp.float32) for v in (x, w))
            total = total + (a @ b.T).astype(jnp.bfloat16)
        return total.astype(workload.dtype("x"))

    return matmul
