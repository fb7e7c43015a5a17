"""Routing by sorting the scores; the bias only chooses."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.ROUTE

WORKLOADS = [
    small_workload("route"),
    small_workload("route", "float32"),
    small_workload("route", optional=("bias",), scoring="sigmoid", scale=2.5),
]


def build(workload, schedule):
    def route(x, router, bias=None):
        logits = x.astype(jnp.float32) @ router.astype(jnp.float32).T
        softmax = workload.option("scoring") == "softmax"
        scores = jax.nn.softmax(logits, -1) if softmax else 1 / (1 + jnp.exp(-logits))
        choosing = scores if bias is None else scores + bias
        ids = jnp.argsort(-choosing, axis=-1, stable=True)[:, : workload.option("top_k")]
        weights = jnp.take_along_axis(scores, ids, -1)
        weights = weights / weights.sum(-1, keepdims=True)
        return ids.astype(jnp.int32), weights * workload.option("scale", 1.0)

    return route
