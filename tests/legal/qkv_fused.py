"""Norm, QKV, rope and cache write without rounding, or with the reference's roundings."""

import jax.numpy as jnp

from polyjax.core import ops, reference
from polyjax.gates.small_workloads import small_workload

OP = ops.NORM_QKV_ROPE_WRITE

WORKLOADS = [
    small_workload("norm_qkv_rope_write"),
    small_workload("norm_qkv_rope_write", "float32"),
    small_workload("norm_qkv_rope_write", optional=("bias", "q_norm", "k_norm")),
]
SCHEDULES = ["fused", "rounded"]


def build(workload, schedule):
    eps, dtype = workload.option("eps"), workload.dtype("x")

    def between(a):
        return a.astype(dtype).astype(jnp.float32) if schedule == "rounded" else a

    def norm_qkv(x, norm, w, bias, q_norm, k_norm, cos_sin, kv, slots):
        x, norm, w = (a.astype(jnp.float32) for a in (x, norm, w))
        kv_heads, group, width, depth = w.shape
        y = between(reference.rms_norm(None, x, norm, eps=eps)) @ w.reshape(-1, depth).T
        if bias is not None:
            y = y + bias.reshape(-1).astype(jnp.float32)
        y = between(y).reshape(-1, kv_heads, group, width)
        q = y[:, :, : group - 2].reshape(len(x), -1, width)
        k, v = y[:, :, group - 2], y[:, :, group - 1]
        if q_norm is not None:
            q = between(reference.rms_norm(None, q, q_norm.astype(jnp.float32), eps=eps))
            k = between(reference.rms_norm(None, k, k_norm.astype(jnp.float32), eps=eps))
        q, k = (reference.rope(None, a, cos_sin) for a in (q, k))
        return q.astype(dtype), reference.kv_write(None, kv, k, v, slots)

    return norm_qkv
