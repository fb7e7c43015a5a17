"""Whole decode stacks of the Llama shapes, at small batches and short to middling contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.shapes import EPS, MODELS, NUM_PAGES, PAGE_SIZE, DecodeShape, array
from polyjax.core.op import Workload
from polyjax.core.ops import DENSE_DECODE_STACK

LAYERS = {"Llama-3.2-1B": 16, "Llama-3.1-8B": 32}  # num_hidden_layers of config.json
ROWS = (1, 2, 4, 8)
CONTEXTS = (1024, 8192)


def arguments(model: DecodeShape, rows: int, context: int) -> tuple[Any, ...]:
    """Returns abstract arguments of the op."""

    def each(*shape: int) -> tuple[Any, ...]:
        return (array(*shape),) * LAYERS[model.name]

    pages = context // PAGE_SIZE
    return (
        array(rows, model.D),
        each(model.D),
        each(model.K, model.group + 2, model.H, model.D),
        each(model.D, model.N * model.H),
        each(model.D),
        each(2, model.F, model.D),
        each(model.D, model.F),
        each(NUM_PAGES, 2, model.K, PAGE_SIZE, model.H),
        array(rows, model.H, dtype=jnp.float32),
        array(rows, pages, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
    )


def calls() -> Iterator[tuple[DecodeShape, tuple[Any, ...]]]:
    """Yields (model, arguments) of every workload."""
    for model in MODELS:
        if model.name in LAYERS:
            for rows in ROWS:
                for context in CONTEXTS:
                    yield model, arguments(model, rows, context)


def workloads() -> Iterator[Workload]:
    for model, args in calls():
        yield DENSE_DECODE_STACK.workload(*args, eps=EPS, scale=model.H**-0.5)
