"""RoPE of the decode shapes' queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import ROPE


def workloads() -> Iterator[Workload]:
    heads = {(n, model.H): None for model in MODELS for n in (model.N, model.K)}
    for count, dim in heads:
        for rows in ROWS:
            angles = array(rows, dim, dtype=jnp.float32)
            yield ROPE.workload(array(rows, count, dim), angles)
