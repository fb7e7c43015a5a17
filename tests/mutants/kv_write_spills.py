"""A vector store spills: the slot after the written one is overwritten too."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.KV_WRITE


def build(workload, schedule):
    def kv_write(kv, k, v, slots):
        page = kv.shape[3]
        new = jnp.stack([k, v], axis=1).astype(kv.dtype)
        kv = kv.at[slots // page, :, :, slots % page].set(new)
        after = jnp.minimum(slots + 1, kv.shape[0] * page - 1)
        spilled = jnp.where(
            (slots % page == page - 2)[:, None, None, None],
            new,
            kv[after // page, :, :, after % page],
        )
        return kv.at[after // page, :, :, after % page].set(spilled)

    return kv_write
