"""Rope as a complex product, and as a product with a rolled copy."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.ROPE

WORKLOADS = [small_workload("rope"), small_workload("rope", "float32")]
SCHEDULES = ["complex", "rolled"]


def build(workload, schedule):
    def rope(x, cos_sin):
        rotary = cos_sin.shape[-1]
        half = rotary // 2
        cos, sin = jnp.split(cos_sin.astype(jnp.float32)[:, None], 2, axis=-1)
        turned = x[..., :rotary].astype(jnp.float32)
        if schedule == "complex":
            z = (turned[..., :half] + 1j * turned[..., half:]) * (cos + 1j * sin)
            out = jnp.concatenate([z.real, z.imag], -1)
        else:
            other = jnp.roll(turned, half, -1) * jnp.where(jnp.arange(rotary) < half, -1.0, 1.0)
            out = turned * jnp.tile(cos, 2) + other * jnp.tile(sin, 2)
        return jnp.concatenate([out.astype(x.dtype), x[..., rotary:]], -1)

    return rope
