"""Gated activations by other formulas."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.GATED_ACTIVATION

WORKLOADS = [
    small_workload("gated_activation"),
    small_workload("gated_activation", "float32"),
    small_workload("gated_activation", activation="gelu"),
]
SCHEDULES = ["first", "second"]


def build(workload, schedule):
    def activated(g):
        if workload.option("activation", "silu") == "gelu":
            if schedule == "first":
                return 0.5 * g * (1 + jax.lax.erf(g * 0.7071067811865476))
            return 0.5 * g * jax.lax.erfc(-g * 0.7071067811865476)
        return g / (1 + jnp.exp(-g)) if schedule == "first" else g * 0.5 * (1 + jnp.tanh(0.5 * g))

    def gated(gate_up):
        gate, up = gate_up[:, 0].astype(jnp.float32), gate_up[:, 1].astype(jnp.float32)
        return (activated(gate) * up).astype(gate_up.dtype)

    return gated
