"""Values are rotated along with the keys."""

import jax.numpy as jnp

from polyjax.core import ops, reference

OP = ops.NORM_QKV_ROPE_WRITE
SUBSET = False


def build(workload, schedule):
    def norm_qkv(x, norm, w, bias, q_norm, k_norm, cos_sin, kv, slots):
        dtype = x.dtype
        x, norm, w = (a.astype(jnp.float32) for a in (x, norm, w))
        kv_heads, group, width, depth = w.shape
        y = reference.rms_norm(None, x, norm, eps=workload.option("eps"))
        y = (y @ w.reshape(-1, depth).T).reshape(-1, kv_heads, group, width)
        q = y[:, :, : group - 2].reshape(len(x), -1, width)
        k, v = y[:, :, group - 2], y[:, :, group - 1]
        q, k, v = (reference.rope(None, a, cos_sin) for a in (q, k, v))
        return q.astype(dtype), reference.kv_write(None, kv, k, v, slots)

    return norm_qkv
