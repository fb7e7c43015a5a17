"""Keys and values swap planes."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.KV_WRITE


def build(workload, schedule):
    def kv_write(kv, k, v, slots):
        page = kv.shape[3]
        new = jnp.stack([k, v], axis=1).astype(kv.dtype)
        new = new[:, ::-1]
        return kv.at[slots // page, :, :, slots % page].set(new)

    return kv_write
