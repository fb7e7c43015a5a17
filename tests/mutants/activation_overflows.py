"""silu as gate * exp(gate) / (1 + exp(gate)): NaN for large gates."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.GATED_ACTIVATION


def build(workload, schedule):
    def gated(gate_up):
        gate, up = gate_up[:, 0].astype(jnp.float32), gate_up[:, 1].astype(jnp.float32)
        return (gate * jnp.exp(gate) / (1 + jnp.exp(gate)) * up).astype(gate_up.dtype)

    return gated
