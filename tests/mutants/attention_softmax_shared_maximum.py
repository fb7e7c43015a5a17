"""Softmax maximum shared by the batch: a row's weights underflow beside a louder row."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.core.reference import causal_mask, gathered_pages

OP = ops.PAGED_ATTENTION
SUBSET = False


def build(workload, schedule):
    scale, dtype = workload.option("scale"), workload.dtype("q")

    def attention(q, kv, table, contexts, queries, first_pages=None):
        q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
        batch, tokens, _heads, width = q.shape
        kv_heads, _page = kv.shape[2:4]
        keys, values = (gathered_pages(kv, table, plane) for plane in (0, 1))
        slots = jnp.arange(keys.shape[2])[None]
        mask = causal_mask(slots, contexts, queries, tokens)
        grouped = q.reshape(batch, tokens, kv_heads, -1, width)
        scores = jnp.einsum("btkgh,bksh->bktgs", grouped, keys) * scale
        shown = mask[:, None, :, None]
        peak = jnp.max(jnp.where(shown, scores, -1e30))
        weights = jnp.where(shown, jnp.exp(scores - peak), 0.0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
        values = jnp.where(mask.any(1)[:, None, :, None], values, 0)
        out = jnp.einsum("bktgs,bksh->btkgh", weights, values)
        return out.reshape(q.shape).astype(dtype)

    return attention
