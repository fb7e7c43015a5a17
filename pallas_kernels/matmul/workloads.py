"""Matmuls of the decode shapes: attention output and down projections with residual, QKV alone."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.shapes import MODELS, ROWS, array
from polyjax.core.op import Workload
from polyjax.core.ops import MATMUL


def workloads() -> Iterator[Workload]:
    """Yields each distinct (rows, N, K, residual) of every model."""
    shapes: dict[tuple[int, int, bool], None] = {}
    for model in MODELS:
        shapes[(model.D, model.N * model.H, True)] = None
        shapes[(model.D, model.F, True)] = None
        shapes[((model.N + 2 * model.K) * model.H, model.D, False)] = None
        shapes[(2 * model.F, model.D, False)] = None
    for outputs, depth, residual in shapes:
        for rows in ROWS:
            added = array(rows, outputs) if residual else None
            yield MATMUL.workload(array(rows, depth), array(outputs, depth), None, added)
