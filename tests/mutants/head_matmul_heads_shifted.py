"""Each head multiplies with the matrix of the next head."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.HEAD_MATMUL


def build(workload, schedule):
    def head_matmul(x, w):
        w = jnp.roll(w, -1, axis=0).astype(jnp.float32)
        return jnp.einsum("mni,noi->mno", x.astype(jnp.float32), w).astype(x.dtype)

    return head_matmul
