"""Candidate absent: its Pallas kernel runs beside, the answer comes from the reference."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from polyjax.core import ops

OP = ops.MATMUL

PALLAS = True


def build(workload, schedule):
    def copy(source, target):
        target[...] = source[...]

    def matmul(x, w, bias=None, residual=None):
        copied = pl.pallas_call(copy, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
        del copied
        return (x.astype(jnp.float32) @ w.astype(jnp.float32).T).astype(workload.dtype("x"))

    return matmul
