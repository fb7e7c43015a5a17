"""Contexts are cut to two pages."""

import dataclasses

import numpy as np

from polyjax.core.batch_layout import BatchLayout


def wrap(program):
    layout = BatchLayout(program.key.bucket, 1)

    def run(params, kv, last_tokens, flat):
        flat = flat.copy()
        batch = layout.split(flat)
        batch.context_lens[:] = np.minimum(batch.context_lens, 2 * kv[0].shape[3])
        return program(params, kv, last_tokens, flat)

    return dataclasses.replace(program, executable=run)
