"""The packed gate and up rows are taken for alternating ones."""

import jax
import jax.numpy as jnp

from polyjax.core import ops

OP = ops.NORM_GATE_UP


def build(workload, schedule):
    def norm_gate_up(x, norm, w):
        xf = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(xf * xf, -1, keepdims=True) + workload.option("eps"))
        rows = w.reshape(-1, w.shape[-1]).astype(jnp.float32)
        y = (xf * scale * norm.astype(jnp.float32)) @ rows.T
        return (jax.nn.silu(y[:, ::2]) * y[:, 1::2]).astype(x.dtype)

    return norm_gate_up
