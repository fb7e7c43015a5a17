"""The norm's weight is applied to the product instead of to the activations."""

import jax
import jax.numpy as jnp

from polyjax.core import ops

OP = ops.NORM_GATE_UP


def build(workload, schedule):
    def norm_gate_up(x, norm, w):
        x, norm, wf = (a.astype(jnp.float32) for a in (x, norm, w))
        scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + workload.option("eps"))
        gate, up = (x * scale) @ wf[0].T * norm.mean(), (x * scale) @ wf[1].T * norm.mean()
        return (jax.nn.silu(gate) * up).astype(workload.dtype("x"))

    return norm_gate_up
