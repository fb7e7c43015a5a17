"""Stale donated alias: what the step wrote is overwritten in place with what was there."""

import ctypes
import dataclasses

import numpy as np


def wrap(program):
    def run(params, kv, last_tokens, flat):
        before = tuple(np.array(pool) for pool in kv)
        pools, *rest = program(params, kv, last_tokens, flat)
        for pool, old in zip(pools, before, strict=True):
            pool.block_until_ready()
            ctypes.memmove(pool.unsafe_buffer_pointer(), old.ctypes.data, old.nbytes)
        return pools, *rest

    return dataclasses.replace(program, executable=run)
