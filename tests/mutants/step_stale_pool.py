"""Stale donated alias: the pools come back as they were before the step."""

import dataclasses

import jax.numpy as jnp


def wrap(program):
    def run(params, kv, last_tokens, flat):
        before = tuple(jnp.copy(pool) for pool in kv)
        pools, *rest = program(params, kv, last_tokens, flat)
        return tuple(pool.at[:].set(old) for pool, old in zip(pools, before, strict=True)), *rest

    return dataclasses.replace(program, executable=run)
