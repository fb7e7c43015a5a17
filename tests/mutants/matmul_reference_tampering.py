"""Reference tampering: the op's reference is replaced by the candidate itself."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.MATMUL


def build(workload, schedule):
    def matmul(x, w, bias=None, residual=None):
        y = x.astype(jnp.float32) @ w.astype(jnp.float32).T
        return (1.01 * y).astype(workload.dtype("x"))

    object.__setattr__(OP, "reference", lambda ops, *args, **static: matmul(*args))
    return matmul
