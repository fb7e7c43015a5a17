"""Values are the last dims of the latent instead of the first."""

import jax.numpy as jnp

from polyjax.core import ops, reference_latent

OP = ops.LATENT_ATTENTION


def build(workload, schedule):
    rank, scale = workload.option("rank"), workload.option("scale")

    def attention(q, kv, table, contexts, queries):
        dtype = q.dtype
        q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
        width = kv.shape[-1]
        whole = reference_latent.latent_attention(
            None, q, kv, table, contexts, queries, scale=scale, rank=width
        )
        return whole[..., width - rank :].astype(dtype)

    return attention
