"""Rope rotates neighbouring pairs instead of half against half."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.ROPE


def build(workload, schedule):
    def rope(x, cos_sin):
        rotary = cos_sin.shape[-1]
        cos, sin = jnp.split(cos_sin.astype(jnp.float32)[:, None], 2, axis=-1)
        even, odd = x[..., :rotary:2].astype(jnp.float32), x[..., 1:rotary:2].astype(jnp.float32)
        pairs = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
        return jnp.concatenate(
            [pairs.reshape(*x.shape[:-1], rotary).astype(x.dtype), x[..., rotary:]], -1
        )

    return rope
