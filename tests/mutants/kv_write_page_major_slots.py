"""Slots are taken apart the wrong way round when the page number is below the offset."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.KV_WRITE
SUBSET = False


def build(workload, schedule):
    def kv_write(kv, k, v, slots):
        page = kv.shape[3]
        new = jnp.stack([k, v], axis=1).astype(kv.dtype)
        page_id, offset = slots // page, slots % page
        swap = page_id < offset
        page_id, offset = jnp.where(swap, offset, page_id), jnp.where(swap, page_id, offset)
        return kv.at[page_id, :, :, offset].set(new)

    return kv_write
