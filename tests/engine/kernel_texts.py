"""Kernel files for tests: a right one, and ones that are wrong in one way each."""

from __future__ import annotations

HEAD = """
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from polyjax.core import ops

OP = ops.RMS_NORM
"""

# Leaves the pid of every process that imports it behind.
MARK = """
with (Path({folder!r}) / "imported_by").open("a") as mark:
    mark.write(f"{{os.getpid()}}\\n")
"""

RIGHT = """
SPACE = {"pieces": (1, 2, 4)}

def build(workload, schedule):
    eps = workload.option("eps")

    def rms_norm(x, weight):
        wide = x.astype(jnp.float32)
        parts = jnp.split(wide * wide, schedule.pieces, axis=-1)
        mean = sum(part.sum(-1, keepdims=True) for part in parts) / x.shape[1]
        return (wide / jnp.sqrt(mean + eps) * weight.astype(jnp.float32)).astype(x.dtype)

    return rms_norm

def supports(workload):
    return workload["D"] % 4 == 0
"""

PALLAS = """
from jax.experimental import pallas as pl

PALLAS = True

def build(workload, schedule):
    eps = workload.option("eps")

    def body(x, weight, out):
        wide = x[...].astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
        out[...] = (wide * scale * weight[...].astype(jnp.float32)).astype(out.dtype)

    def rms_norm(x, weight):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=shape, interpret=True)(x, weight)

    return rms_norm
"""

WRONG_VALUES = RIGHT.replace("mean + eps", "mean * 1.01 + eps")

HANGS_AT_IMPORT = "import time\ntime.sleep(3600)\n" + RIGHT
CRASHES_AT_IMPORT = "os.kill(os.getpid(), 11)\n" + RIGHT
EXITS_AT_IMPORT = "os._exit(0)\n" + RIGHT
RAISES_AT_IMPORT = "raise RuntimeError('no luck')\n" + RIGHT
NO_SYNTAX = "def build(workload, schedule)\n"
NO_BUILD = ""
OTHER_SHAPE = """
def build(workload, schedule):
    return lambda x, weight: x[:, :1]
"""
HUGE_COMPILE = """
def build(workload, schedule):
    def rms_norm(x, weight):
        for index in range(1_000_000):
            x = jnp.sin(x) + index
        return x

    return rms_norm
"""

# Attention that reads the wrong page: the first of the table for every token.
WRONG_PAGE = """
import jax.numpy as jnp
from polyjax.core import ops
from polyjax.core.op import REFERENCE

OP = ops.PAGED_ATTENTION

def build(workload, schedule):
    def attention(q, kv, page_table, *rest):
        table = jnp.broadcast_to(page_table[:1], page_table.shape)
        return REFERENCE(OP, q, kv, table, *rest, **dict(workload.static))

    return attention
"""
