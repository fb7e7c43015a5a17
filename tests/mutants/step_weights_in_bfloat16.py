"""Precision downgrade: weights pass through bfloat16 in a float32 program."""

import dataclasses

import jax
import jax.numpy as jnp

SUBSET = False


def wrap(program):
    narrow = jax.jit(lambda p: jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), p))

    def run(params, kv, last_tokens, flat):
        return program(narrow(params), kv, last_tokens, flat)

    return dataclasses.replace(program, executable=run)
