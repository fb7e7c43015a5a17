"""Gate and up projections of the decode shapes."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.shapes import EPS, MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import NORM_GATE_UP


def workloads() -> Iterator[Workload]:
    for model in MODELS:
        for rows in ROWS:
            arrays = array(rows, model.D), array(model.D), array(2, model.F, model.D)
            yield NORM_GATE_UP.workload(*arrays, eps=EPS, activation="silu")
