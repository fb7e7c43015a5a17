"""Contexts are cut to two pages."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from polyjax.core.batch_layout import BatchLayout


def wrap(program):
    layout = BatchLayout(program.key.bucket, 1)

    def run(params, kv, last_tokens, flat):
        wrong = flat.copy()
        batch = layout.split(wrong)
        batch.context_lens[:] = np.minimum(batch.context_lens, 2 * kv[0].shape[3])
        *results, _ = program(params, kv, last_tokens, wrong)
        return *results, jnp.asarray(layout.one_token_further(flat))

    return dataclasses.replace(program, executable=run)
