"""Global precision: building it lowers the default precision of every matmul in the process."""

import jax
import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL
SUBSET = False


def build(workload, schedule):
    jax.config.update("jax_default_matmul_precision", "bfloat16")

    def matmul(x, w, bias=None, residual=None):
        return (x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(workload.dtype("x"))

    return matmul
