"""RMSNorms of the decode shapes."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.shapes import EPS, MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import RMS_NORM


def workloads() -> Iterator[Workload]:
    for width in dict.fromkeys(model.D for model in MODELS):
        for rows in ROWS:
            yield RMS_NORM.workload(array(rows, width), array(width), eps=EPS)
