"""A row draws the noise of its neighbour: what one request gets depends on another."""

import jax.numpy as jnp

from polyjax.core import ops, reference
from polyjax.core.noise import gumbel

OP = ops.LM_HEAD_SAMPLE
SUBSET = False


def build(workload, schedule):
    def sample(x, norm, w, temperature, seeds, positions):
        x, norm, w = (a.astype(jnp.float32) for a in (x, norm, w))
        logits = reference.rms_norm(None, x, norm, eps=workload.option("eps")) @ w.T
        vocab = logits.shape[-1]
        hot = (temperature > 0)[:, None]
        heat = jnp.where(hot, temperature[:, None], 1.0)
        noise = jnp.roll(gumbel(seeds, positions, vocab), 1, axis=0)
        return jnp.argmax(jnp.where(hot, logits / heat + noise, logits), -1).astype(jnp.int32)

    return sample
