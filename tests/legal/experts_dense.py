"""Experts computed for every token and selected, or token after token."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.EXPERTS

WORKLOADS = [small_workload("experts"), small_workload("experts", "float32")]
SCHEDULES = ["dense", "gathered"]


def build(workload, schedule):
    dtype = workload.dtype("x")

    def between(a):
        return a.astype(dtype).astype(jnp.float32)

    def experts(x, ids, weights, gate_up, down):
        x, gate_up, down = (a.astype(jnp.float32) for a in (x, gate_up, down))
        if schedule == "dense":
            y = jnp.einsum("md,ecfd->mecf", x, gate_up)
            y = jnp.einsum("mef,edf->med", jax.nn.silu(y[:, :, 0]) * y[:, :, 1], down)
            chosen = (ids[:, :, None] == jnp.arange(len(down))) * weights[:, :, None]
            return jnp.einsum("mae,med->md", chosen, y)
        inside = (ids >= 0) & (ids < len(down))
        index = jnp.where(inside, ids, 0)
        y = between(jnp.einsum("md,macfd->macf", x, gate_up[index]))
        h = between(jax.nn.silu(y[:, :, 0]) * y[:, :, 1])
        return jnp.einsum("ma,maf,madf->md", jnp.where(inside, weights, 0.0), h, down[index])

    return experts
