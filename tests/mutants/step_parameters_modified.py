"""Parameters modified: a weight matrix is scaled in place, a little at each step."""

import ctypes
import dataclasses

import jax
import numpy as np


def wrap(program):
    def run(params, kv, last_tokens, flat):
        results = program(params, kv, last_tokens, flat)
        jax.block_until_ready(results)
        weight = max(params, key=lambda p: p.size)
        changed = np.asarray(weight) * np.float32(1.0001)
        ctypes.memmove(weight.unsafe_buffer_pointer(), changed.ctypes.data, changed.nbytes)
        return results

    return dataclasses.replace(program, executable=run)
