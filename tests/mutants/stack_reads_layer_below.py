"""The second layer's attention reads the first layer's pool."""

import jax.numpy as jnp

from polyjax.core import ops, reference
from polyjax.core.op import REFERENCE as OPS
from polyjax.gates.inputs import in_dtype
from polyjax.gates.small_workloads import small_workload

OP = ops.DENSE_DECODE_STACK

WORKLOAD = in_dtype(small_workload("dense_decode_stack"), "float32")
SUBSET = False


def supports(workload):
    return workload.dtype("x") == jnp.float32


def build(workload, schedule):
    eps, scale = workload.option("eps"), workload.option("scale")

    def stack(x, attn_norm, qkv, o, mlp_norm, gate_up, down, kv, cos_sin, table, contexts):
        live = contexts > 0
        position = jnp.maximum(contexts - 1, 0)
        page = kv[0].shape[3]
        slots = table[jnp.arange(len(x)), position // page] * page + position % page
        slots = jnp.where(live, slots, 0)
        pools = list(kv)
        for n in range(len(kv)):
            q, written = OPS(
                ops.NORM_QKV_ROPE_WRITE,
                x,
                attn_norm[n],
                qkv[n],
                None,
                None,
                None,
                cos_sin,
                pools[n],
                slots,
                eps=eps,
            )
            read = written
            read = pools[0] if n else written
            heads = reference.paged_attention(
                OPS, q[:, None], read, table, contexts, live.astype(jnp.int32), scale=scale
            )
            x = x + heads.reshape(len(x), -1) @ o[n].T
            h = OPS(ops.NORM_GATE_UP, x, mlp_norm[n], gate_up[n], eps=eps)
            x = x + h @ down[n].T
            pools[n] = written
        return x, tuple(pools)

    return stack
