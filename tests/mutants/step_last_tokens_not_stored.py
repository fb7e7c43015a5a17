"""The sampled token is returned but not stored: the next step continues from the old one."""

import ctypes
import dataclasses

import numpy as np


def wrap(program):
    def run(params, kv, last_tokens, flat):
        before = np.array(last_tokens)
        pools, stored, tokens, hidden, following = program(params, kv, last_tokens, flat)
        stored.block_until_ready()
        ctypes.memmove(stored.unsafe_buffer_pointer(), before.ctypes.data, before.nbytes)
        return pools, stored, tokens, hidden, following

    return dataclasses.replace(program, executable=run)
