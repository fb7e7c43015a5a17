"""Attention inputs of the decode shapes, without biases and qk-norm as in Llama."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import EPS, MODELS, NUM_PAGES, PAGE_SIZE, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import NORM_QKV_ROPE_WRITE


def workloads() -> Iterator[Workload]:
    for model in MODELS:
        for rows in ROWS:
            yield NORM_QKV_ROPE_WRITE.workload(
                array(rows, model.D),
                array(model.D),
                array(model.K, model.group + 2, model.H, model.D),
                None,
                None,
                None,
                array(rows, model.H, dtype=jnp.float32),
                array(NUM_PAGES, 2, model.K, PAGE_SIZE, model.H),
                array(rows, dtype=jnp.int32),
                eps=EPS,
            )
