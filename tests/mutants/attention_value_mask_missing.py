"""Values are not masked: 0 times the NaN in a slot that nobody owns is NaN."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.core.reference import causal_mask, gathered_pages, masked_softmax

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
        weights = masked_softmax(scores, mask[:, None, :, None])
        values = jnp.where(mask.any(1)[:, None, :, None], values, 0)
        values = gathered_pages(kv, table, 1)
        out = jnp.einsum("bktgs,bksh->btkgh", weights, values)
        return out.reshape(q.shape).astype(dtype)

    return attention
