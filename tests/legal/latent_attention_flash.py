"""Latent attention over chunks of slots with a running maximum."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.core.reference import causal_mask, gathered_pages
from polyjax.gates.small_workloads import small_workload

OP = ops.LATENT_ATTENTION

WORKLOADS = [small_workload("latent_attention"), small_workload("latent_attention", "float32")]
SCHEDULES = [20, 50]


def build(workload, schedule):
    rank, scale = workload.option("rank"), workload.option("scale")

    def attention(q, kv, table, contexts, queries):
        keys = gathered_pages(kv, table, 0)[:, 0].astype(jnp.float32)
        mask = causal_mask(jnp.arange(keys.shape[1])[None], contexts, queries, q.shape[1])
        shape = (*q.shape[:3], 1)
        out, peak, total = jnp.zeros((*q.shape[:3], rank)), jnp.full(shape, -1e30), jnp.zeros(shape)
        for first in range(0, keys.shape[1], schedule):
            part, shown = keys[:, first : first + schedule], mask[:, :, first : first + schedule]
            scores = jnp.einsum("btnl,bsl->btns", q.astype(jnp.float32), part) * scale
            scores = jnp.where(shown[:, :, None], scores, -1e30)
            higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
            weights = jnp.where(shown[:, :, None], jnp.exp(scores - higher), 0.0)
            values = jnp.where(shown.any(1)[:, :, None], part[..., :rank], 0.0)
            keep = jnp.exp(peak - higher)
            out = out * keep + jnp.einsum("btns,bsr->btnr", weights, values)
            total, peak = total * keep + weights.sum(-1, keepdims=True), higher
        return (out / jnp.where(total == 0, 1.0, total)).astype(q.dtype)

    return attention
