"""Logits are rounded to bfloat16 before they become float32."""

import jax.numpy as jnp

from polyjax.core import ops, reference

OP = ops.LM_HEAD


def build(workload, schedule):
    def lm_head(x, norm, w):
        x, norm, w = (a.astype(jnp.float32) for a in (x, norm, w))
        logits = reference.rms_norm(None, x, norm, eps=workload.option("eps")) @ w.T
        return logits.astype(jnp.bfloat16).astype(jnp.float32)

    return lm_head
