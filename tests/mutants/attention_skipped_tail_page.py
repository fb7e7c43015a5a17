"""Skipped tail page: a last page that is not full is not read."""

import jax.numpy as jnp

from polyjax.core import ops
from polyjax.core.reference import causal_mask, gathered_pages, masked_softmax

OP = ops.PAGED_ATTENTION


def build(workload, schedule):
    page, scale = workload["Z"], workload.option("scale")

    def attention(q, kv, table, contexts, queries, first_pages=None):
        q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
        batch, tokens, _heads, width = q.shape
        keys, values = (gathered_pages(kv, table, plane) for plane in (0, 1))
        mask = causal_mask(jnp.arange(keys.shape[2])[None], contexts, queries, tokens)
        whole = jnp.maximum(contexts // page * page, 1)
        mask &= (jnp.arange(keys.shape[2])[None] < whole[:, None])[:, None]
        grouped = q.reshape(batch, tokens, kv.shape[2], -1, width)
        scores = jnp.einsum("btkgh,bksh->bktgs", grouped, keys) * scale
        weights = masked_softmax(scores, mask[:, None, :, None])
        values = jnp.where(mask.any(1)[:, None, :, None], values, 0)
        out = jnp.einsum("bktgs,bksh->btkgh", weights, values)
        return out.reshape(q.shape).astype(workload.dtype("q"))

    return attention
