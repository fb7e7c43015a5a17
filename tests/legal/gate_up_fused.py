"""Norm, gate, up and activation without rounding; the scale before or after the product."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.NORM_GATE_UP

WORKLOADS = [
    small_workload("norm_gate_up"),
    small_workload("norm_gate_up", "float32"),
    small_workload("norm_gate_up", activation="gelu_pytorch_tanh"),
]
SCHEDULES = ["scale first", "scale last"]
_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}


def build(workload, schedule):
    activation = _ACTIVATIONS[workload.option("activation", "silu")]

    def norm_gate_up(x, norm, w):
        xf, wf = x.astype(jnp.float32), w.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(xf * xf, -1, keepdims=True) + workload.option("eps"))
        y = xf * norm.astype(jnp.float32)
        if schedule == "scale first":
            gate, up = (y * scale) @ wf[0].T, (y * scale) @ wf[1].T
        else:
            gate, up = (y @ wf[0].T) * scale, (y @ wf[1].T) * scale
        return (activation(gate) * up).astype(x.dtype)

    return norm_gate_up
