"""LM heads with sampling of the decode shapes, greedy and with noise."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.shapes import EPS, MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import LM_HEAD_SAMPLE


def workloads() -> Iterator[Workload]:
    for model in MODELS:
        for rows in ROWS:
            arrays = (
                array(rows, model.D),
                array(model.D),
                array(model.V, model.D),
                array(rows, dtype=jnp.float32),
                array(rows, dtype=jnp.uint32),
                array(rows, dtype=jnp.int32),
            )
            for greedy in (False, True):
                yield LM_HEAD_SAMPLE.workload(*arrays, eps=EPS, greedy=greedy)
