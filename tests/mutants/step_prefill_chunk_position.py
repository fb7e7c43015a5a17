"""Prefill: the second token of every chunk is taken for the first."""

import dataclasses

from polyjax.core.batch_layout import BatchLayout

KIND = "prefill"


def wrap(program):
    layout = BatchLayout(program.key.bucket, 1)

    def run(params, kv, last_tokens, flat):
        flat = flat.copy()
        tokens = layout.split(flat).tokens
        tokens[:, 1:2] = tokens[:, :1]
        return program(params, kv, last_tokens, flat)

    return dataclasses.replace(program, executable=run)
