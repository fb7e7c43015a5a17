"""KV writes of the decode shapes."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import MODELS, NUM_PAGES, PAGE_SIZE, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import KV_WRITE


def workloads() -> Iterator[Workload]:
    for heads, dim in dict.fromkeys((model.K, model.H) for model in MODELS):
        for rows in ROWS:
            new = array(rows, heads, dim)
            pool = array(NUM_PAGES, 2, heads, PAGE_SIZE, dim)
            yield KV_WRITE.workload(pool, new, new, array(rows, dtype=jnp.int32))
