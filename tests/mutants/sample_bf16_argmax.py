"""The best token is searched among logits rounded to bfloat16."""

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
        noise = gumbel(seeds, positions, vocab)
        scores = jnp.where(hot, logits / heat + noise, logits)
        return jnp.argmax(scores.astype(jnp.bfloat16), -1).astype(jnp.int32)

    return sample
