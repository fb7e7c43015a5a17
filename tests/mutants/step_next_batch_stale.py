"""The packed array for the next step is this step's: its token is written over this one's."""

import dataclasses

import jax.numpy as jnp


def wrap(program):
    def run(params, kv, last_tokens, flat):
        *results, _ = program(params, kv, last_tokens, flat)
        return *results, jnp.asarray(flat)

    return dataclasses.replace(program, executable=run)
