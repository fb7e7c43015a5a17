"""The bias that only chooses experts enters their weights."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.ROUTE

WORKLOAD = small_workload("route", optional=("bias",), scoring="sigmoid", scale=2.5)


def build(workload, schedule):
    def route(x, router, bias=None):
        scores = jax.nn.sigmoid(x.astype(jnp.float32) @ router.astype(jnp.float32).T)
        best, ids = jax.lax.top_k(scores + bias, workload.option("top_k"))
        return ids, best / best.sum(-1, keepdims=True) * workload.option("scale", 1.0)

    return route
