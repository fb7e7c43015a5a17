"""Paged attention of the decode shapes at short and long contexts, and of prompts in chunks."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import MODELS, NUM_PAGES, PAGE_SIZE, ROWS, DecodeShape, array
from polyjax.core.op import Workload
from polyjax.core.ops import PAGED_ATTENTION

CONTEXTS = (1024, 4096, 32768)
# (sequences, new tokens each, context): whole prompts, several together, a chunk of a long one.
PROMPTS = ((8, 1024, 1024), (4, 2048, 2048), (1, 8192, 8192), (1, 2048, 32768), (4, 64, 1024))


def workload(
    model: DecodeShape, rows: int, context: int, page_size: int = PAGE_SIZE, tokens: int = 1
) -> Workload:
    """Returns `tokens` new tokens a sequence over `context` tokens of pages."""
    return PAGED_ATTENTION.workload(
        array(rows, tokens, model.N, model.H),
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
    for model in MODELS:
        for rows, tokens, context in PROMPTS:
            yield workload(model, rows, context, tokens=tokens)
