"""bfloat16 accumulation: weighted values are summed page by page in bfloat16."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.core.reference import causal_mask, gathered_pages, masked_softmax

OP = ops.PAGED_ATTENTION
SUBSET = False


def build(workload, schedule):
    scale, dtype = workload.option("scale"), workload.dtype("q")

    def attention(q, kv, table, contexts, queries, first_pages=None):
        q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
        batch, tokens, heads, width = q.shape
        kv_heads, page = kv.shape[2:4]
        keys, values = (gathered_pages(kv, table, plane) for plane in (0, 1))
        slots = jnp.arange(keys.shape[2])[None]
        mask = causal_mask(slots, contexts, queries, tokens)
        grouped = q.reshape(batch, tokens, kv_heads, -1, width)
        scores = jnp.einsum("btkgh,bksh->bktgs", grouped, keys) * scale
        weights = masked_softmax(scores, mask[:, None, :, None])
        values = jnp.where(mask.any(1)[:, None, :, None], values, 0)
        total = jnp.zeros((batch, tokens, kv_heads, heads // kv_heads, width), jnp.bfloat16)
        for first in range(0, keys.shape[2], page):
            part = slice(first, first + page)
            product = jnp.einsum("bktgs,bksh->btkgh", weights[..., part], values[:, :, part])
            total = total + product.astype(jnp.bfloat16)
        return total.reshape(q.shape).astype(dtype)

    return attention
