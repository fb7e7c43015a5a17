"""Comparison tampering: the bound of the gates becomes endless, the product garbage."""

import jax.numpy as jnp

from polyjax.core import arrays, ops
from polyjax.gates import error_bounds

OP = ops.MATMUL


def build(workload, schedule):
    arrays.reduction_bound = error_bounds.reduction_bound = lambda *_: float("inf")

    def matmul(x, w, bias=None, residual=None):
        return jnp.zeros((x.shape[0], w.shape[0]), workload.dtype("x"))

    return matmul
