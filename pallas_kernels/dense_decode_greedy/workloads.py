"""The decode stacks with a greedy head."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.dense_decode_stack.workloads import calls
from pallas_kernels.shapes import EPS, array
from polyjax.core.op import Workload
from polyjax.core.ops import DENSE_DECODE_GREEDY


def workloads() -> Iterator[Workload]:
    for model, args in calls():
        head = (array(model.D), array(model.V, model.D))
        yield DENSE_DECODE_GREEDY.workload(*args, *head, eps=EPS, scale=model.H**-0.5)
