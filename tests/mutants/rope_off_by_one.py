"""Off-by-one rope: every token is rotated by the position of the row before it."""

import jax.numpy as jnp

from polyjax.core import ops, reference

OP = ops.ROPE


def build(workload, schedule):
    return lambda x, cos_sin: reference.rope(None, x, jnp.roll(cos_sin, 1, axis=0))
