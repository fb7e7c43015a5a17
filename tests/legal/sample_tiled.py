"""Sampling that keeps the best of each vocabulary tile, lowest id on ties."""

import jax.numpy as jnp

from polyjax.core import ops, reference
from polyjax.core.noise import gumbel_of, row_keys
from polyjax.gates.small_workloads import small_workload

OP = ops.LM_HEAD_SAMPLE

WORKLOADS = [
    small_workload("lm_head_sample"),
    small_workload("lm_head_sample", "float32"),
    small_workload("lm_head_sample", greedy=True),
]
SCHEDULES = [32, 50, 128]
SUBSET = False


def build(workload, schedule):
    def sample(x, norm, w, temperature, seeds, positions):
        x, norm, w = (a.astype(jnp.float32) for a in (x, norm, w))
        y = reference.rms_norm(None, x, norm, eps=workload.option("eps"))
        keys = row_keys(seeds.astype(jnp.uint32), positions)
        hot = (temperature > 0)[:, None] & (not workload.option("greedy", False))
        best, token = jnp.full(len(x), -jnp.inf), jnp.zeros(len(x), jnp.int32)
        for first in range(0, w.shape[0], schedule):
            logits = y @ w[first : first + schedule].T
            ids = first + jnp.arange(logits.shape[1], dtype=jnp.int32)
            noise = gumbel_of(keys[0][:, None], keys[1][:, None], ids[None])
            heat = jnp.where(hot, temperature[:, None], 1.0)
            scores = logits / heat + jnp.where(hot, noise, 0.0)
            here = scores.max(-1)
            token = jnp.where(here > best, ids[jnp.argmax(scores, -1)], token)
            best = jnp.maximum(here, best)
        return token

    return sample
