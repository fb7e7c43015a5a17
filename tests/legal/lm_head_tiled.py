"""LM head in tiles of the vocabulary, the norm's scale applied to the logits."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.LM_HEAD

WORKLOADS = [
    small_workload("lm_head"),
    small_workload("lm_head", "float32"),
    small_workload("lm_head", soft_cap=15.0),
]
SCHEDULES = [32, 50, 128]


def build(workload, schedule):
    cap = workload.option("soft_cap", 0.0)

    def lm_head(x, norm, w):
        xf = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(xf * xf, -1, keepdims=True) + workload.option("eps"))
        y = xf * norm.astype(jnp.float32)
        tiles = [
            y @ w[first : first + schedule].astype(jnp.float32).T * scale
            for first in range(0, w.shape[0], schedule)
        ]
        logits = jnp.concatenate(tiles, -1)
        return cap * jnp.tanh(logits / cap) if cap else logits

    return lm_head
