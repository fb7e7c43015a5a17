"""LM heads of the decode shapes."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.shapes import EPS, MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import LM_HEAD


def workloads() -> Iterator[Workload]:
    for model in MODELS:
        for rows in ROWS:
            arrays = array(rows, model.D), array(model.D), array(model.V, model.D)
            yield LM_HEAD.workload(*arrays, eps=EPS)
