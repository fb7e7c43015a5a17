"""Prefill: the last token of a full chunk is computed but its keys are lost."""

import dataclasses

import jax

from polyjax.core.batch_layout import BatchLayout

KIND = "prefill"


def wrap(program):
    layout = BatchLayout(program.key.bucket, 1)
    put_back = jax.jit(
        lambda pool, page, at, old: pool.at[page, :, :, at].set(old), donate_argnums=0
    )

    def run(params, kv, last_tokens, flat):
        batch = layout.split(flat)
        last = int(batch.context_lens[0]) - 1
        page, at = batch.page_tables[0, 0, max(last, 0) // 4], last % 4
        old = [pool[page, :, :, at] for pool in kv]
        pools, *rest = program(params, kv, last_tokens, flat)
        if batch.query_lens[0]:
            pools = tuple(put_back(p, page, at, o) for p, o in zip(pools, old, strict=True))
        return pools, *rest

    return dataclasses.replace(program, executable=run)
