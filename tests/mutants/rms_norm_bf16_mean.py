"""bfloat16 accumulation of the mean of squares."""

import jax
import jax.numpy as jnp

from polyjax.core import ops

OP = ops.RMS_NORM


def build(workload, schedule):
    def rms_norm(x, weight):
        xf = x.astype(jnp.float32)
        total = jnp.zeros((x.shape[0], 1), jnp.bfloat16)
        for column in range(0, x.shape[1], 8):
            part = xf[:, column : column + 8]
            total = total + jnp.sum(part * part, -1, keepdims=True).astype(jnp.bfloat16)
        mean = total.astype(jnp.float32) / x.shape[1]
        scale = jax.lax.rsqrt(mean + workload.option("eps"))
        return (xf * scale * weight.astype(jnp.float32)).astype(x.dtype)

    return rms_norm
