"""One product a head, in a loop or elementwise."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.HEAD_MATMUL

WORKLOADS = [small_workload("head_matmul"), small_workload("head_matmul", "float32")]
SCHEDULES = ["loop", "elementwise"]


def build(workload, schedule):
    def head_matmul(x, w):
        xf, wf = x.astype(jnp.float32), w.astype(jnp.float32)
        if schedule == "loop":
            return jnp.stack([xf[:, n] @ wf[n].T for n in range(w.shape[0])], 1).astype(x.dtype)
        return jnp.sum(xf[:, :, None] * wf[None], -1).astype(x.dtype)

    return head_matmul
