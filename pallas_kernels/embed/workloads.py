"""Embedding lookups of the decode shapes."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import EMBED


def workloads() -> Iterator[Workload]:
    for vocabulary, width in dict.fromkeys((model.V, model.D) for model in MODELS):
        for rows in ROWS:
            yield EMBED.workload(array(vocabulary, width), array(rows, dtype=jnp.int32))
