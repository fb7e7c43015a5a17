"""A race whose outcome stays within rounding: the hidden state differs in its last bits."""

import dataclasses

import numpy as np


def wrap(program):
    rng = np.random.default_rng()

    def run(params, kv, last_tokens, flat):
        pools, stored, tokens, hidden, following = program(params, kv, last_tokens, flat)
        noise = 1 + 1e-7 * rng.integers(-2, 3, hidden.shape).astype(np.float32)
        return pools, stored, tokens, hidden * noise, following

    return dataclasses.replace(program, executable=run)
