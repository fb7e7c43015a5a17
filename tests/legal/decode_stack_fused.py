"""The dense decode stack, activations kept in float32 between layers or rounded as in pieces."""

import jax
import jax.numpy as jnp

from polyjax.core import ops, reference
from polyjax.core.op import REFERENCE
from polyjax.gates.small_workloads import small_workload

OP = ops.DENSE_DECODE_STACK

WORKLOADS = [
    small_workload("dense_decode_stack"),
    small_workload("dense_decode_stack", "float32"),
    small_workload("dense_decode_greedy"),
]
SCHEDULES = ["fused", "rounded"]
SUBSET = False


def build(workload, schedule):
    dtype = workload.dtype("x")
    eps, scale = workload.option("eps"), workload.option("scale")

    def between(a):
        return a.astype(dtype).astype(jnp.float32) if schedule == "rounded" else a

    def f32(tree):
        return jax.tree.map(lambda a: a.astype(jnp.float32), tree)

    def layer(x, pool, norm, qkv, o, norm2, gate_up, down, cos_sin, table, contexts, slots):
        live = (contexts > 0).astype(jnp.int32)
        y = between(reference.rms_norm(None, x, norm, eps=eps))
        y = between(jnp.einsum("bd,kghd->bkgh", y, qkv))
        group = qkv.shape[1]
        q = y[:, :, : group - 2].reshape(len(x), -1, qkv.shape[2])
        q = between(reference.rope(None, q, cos_sin))
        k = between(reference.rope(None, y[:, :, group - 2], cos_sin))
        pool = reference.kv_write(None, pool, k, y[:, :, group - 1], slots)
        heads = reference.paged_attention(
            None, q[:, None], pool.astype(jnp.float32), table, contexts, live, scale=scale
        )
        x = between(x + between(heads.reshape(len(x), -1)) @ o.T)
        h = between(reference.rms_norm(None, x, norm2, eps=eps))
        gate, up = between(h @ gate_up[0].T), between(h @ gate_up[1].T)
        return between(x + between(jax.nn.silu(gate) * up) @ down.T), pool

    def stack(x, *args):
        *weights, kv, cos_sin, table, contexts = args[:10]
        live, position = contexts > 0, jnp.maximum(contexts - 1, 0)
        page = kv[0].shape[3]
        slots = table[jnp.arange(len(x)), position // page] * page + position % page
        slots = jnp.where(live, slots, 0)
        y, pools = x.astype(jnp.float32), []
        for n, pool in enumerate(kv):
            y, pool = layer(y, pool, *(f32(w[n]) for w in weights), cos_sin, table, contexts, slots)
            pools.append(pool)
        if workload.op == "dense_decode_stack":
            return y.astype(dtype), tuple(pools)
        logits = ops.LM_HEAD.reference(REFERENCE, y, *f32(args[10:]), eps=eps)
        return jnp.argmax(logits, -1).astype(jnp.int32), y.astype(dtype), tuple(pools)

    return stack
