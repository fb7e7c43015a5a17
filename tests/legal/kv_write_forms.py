"""KV write one token after the other, and as a scatter into the flattened pool."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.KV_WRITE

WORKLOADS = [small_workload("kv_write"), small_workload("kv_write", "float32")]
SCHEDULES = ["loop", "backward", "flat"]


def build(workload, schedule):
    def kv_write(kv, k, v, slots):
        page = kv.shape[3]
        new = jnp.stack([k, v], axis=1).astype(kv.dtype)
        if schedule == "flat":
            flat = (
                jnp.moveaxis(kv, 3, 1).reshape(-1, *kv.shape[1:3], kv.shape[4]).at[slots].set(new)
            )
            return jnp.moveaxis(flat.reshape(kv.shape[0], page, *flat.shape[1:]), 1, 3)
        count = len(slots)

        def write(index, pool):
            row = count - 1 - index if schedule == "backward" else index
            update = new[row][None, :, :, None]
            return jax.lax.dynamic_update_slice(
                pool, update, (slots[row] // page, 0, 0, slots[row] % page, 0)
            )

        return jax.lax.fori_loop(0, count, write, kv)

    return kv_write
