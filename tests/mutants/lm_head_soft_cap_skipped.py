"""The soft cap of the logits is left out."""

import jax.numpy as jnp

from polyjax.core import ops, reference
from polyjax.gates.small_workloads import small_workload

OP = ops.LM_HEAD

WORKLOAD = small_workload("lm_head", soft_cap=15.0)
SUBSET = False


def build(workload, schedule):
    def lm_head(x, norm, w):
        x, norm, w = (a.astype(jnp.float32) for a in (x, norm, w))
        return reference.rms_norm(None, x, norm, eps=workload.option("eps")) @ w.T

    return lm_head
