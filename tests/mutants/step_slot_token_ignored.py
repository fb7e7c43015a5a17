"""The slot's last token is ignored: rows continue from the token in the batch."""

import dataclasses

from polyjax.core.batch_layout import FROM_SLOT, BatchLayout


def wrap(program):
    layout = BatchLayout(program.key.bucket, 1)

    def run(params, kv, last_tokens, flat):
        flat = flat.copy()
        layout.split(flat).flags[:] &= ~FROM_SLOT
        return program(params, kv, last_tokens, flat)

    return dataclasses.replace(program, executable=run)
