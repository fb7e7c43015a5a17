"""The slot's last token is ignored: rows continue from the token in the batch."""

import dataclasses

import jax.numpy as jnp

from polyjax.core.batch_layout import FROM_SLOT, BatchLayout


def wrap(program):
    layout = BatchLayout(program.key.bucket, 1)

    def run(params, kv, last_tokens, flat):
        wrong = flat.copy()
        layout.split(wrong).flags[:] &= ~FROM_SLOT
        *results, _ = program(params, kv, last_tokens, wrong)
        return *results, jnp.asarray(layout.one_token_further(flat))

    return dataclasses.replace(program, executable=run)
