"""The erf form of gelu is replaced by x * sigmoid(1.702 x)."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.GATED_ACTIVATION

WORKLOAD = small_workload("gated_activation", activation="gelu")


def build(workload, schedule):
    def gated(gate_up):
        gate, up = gate_up[:, 0].astype(jnp.float32), gate_up[:, 1].astype(jnp.float32)
        return (gate * jax.nn.sigmoid(1.702 * gate) * up).astype(gate_up.dtype)

    return gated
