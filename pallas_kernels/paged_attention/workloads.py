"""Paged decode attention of the decode shapes, at short and long contexts."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import MODELS, NUM_PAGES, PAGE_SIZE, ROWS, DecodeShape, array
from polyjax.core.op import Workload
from polyjax.core.ops import PAGED_ATTENTION

CONTEXTS = (1024, 4096, 32768)


def workload(model: DecodeShape, rows: int, context: int, page_size: int = PAGE_SIZE) -> Workload:
    """Returns one new token a sequence over `context` tokens of pages."""
    return PAGED_ATTENTION.workload(
        array(rows, 1, model.N, model.H),
        array(NUM_PAGES, 2, model.K, page_size, model.H),
        array(rows, context // page_size, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
        scale=model.H**-0.5,
    )


def workloads() -> Iterator[Workload]:
    for model in MODELS:
        for rows in ROWS:
            for context in CONTEXTS:
                yield workload(model, rows, context)
