"""Stale donated alias: the pool comes back as it was given."""

import jax.numpy as jnp

from polyjax.core import ops

OP = ops.KV_WRITE


def build(workload, schedule):
    def kv_write(kv, k, v, slots):
        kv.shape[3]
        new = jnp.stack([k, v], axis=1).astype(kv.dtype)
        return kv + 0 * new.astype(kv.dtype).sum() * 0

    return kv_write
