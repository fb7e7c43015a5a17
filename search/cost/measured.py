"""The single schedules whose time the repository's results record, as points of a cost model."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels import CATALOGUE
from pallas_kernels.shapes import array
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Kernel, Schedule, Workload
from polyjax.core.ops import LM_HEAD, LM_HEAD_SAMPLE, MATMUL, PAGED_ATTENTION
from polyjax.core.results import Result, read
from search.cost.analytical import BORDER_US, terms

# The sizes behind the names in docs/results/kernels (scripts/bench_kernels).
_MATMULS = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
_GEMVS = {"64mb": (16384, 2048), "256mb": (32768, 4096)}
_ATTENTIONS = {"b64_ctx4k": (64, 4096), "b1_ctx32k": (1, 32768)}


@dataclasses.dataclass(frozen=True)
class MeasuredSchedule:
    """One row. `mixed` chains had an XLA kernel between two calls, whose border counts."""

    name: str
    kernel: Kernel
    workload: Workload
    schedule: Schedule
    us: float
    mixed: bool

    def predicted_us(self, chip: ChipSpec) -> float:
        border_us = BORDER_US if self.mixed else 0.0
        return terms(self.kernel, self.workload, self.schedule, chip).us + border_us


def matmul(rows: int, outputs: int, depth: int) -> Workload:
    x, w, residual = array(rows, depth), array(outputs, depth), array(rows, outputs)
    return MATMUL.workload(x, w, None, residual)


def attention(batch: int, context: int) -> Workload:
    """32 query and 8 kv heads of 128 dims, pages of 64 tokens, all live."""
    ints = lambda *shape: array(*shape, dtype=jnp.int32)  # noqa: E731
    pages = context // 64
    pool = array(batch * pages + 1, 2, 8, 64, 128)
    q, lens = array(batch, 1, 32, 128), ints(batch)
    return PAGED_ATTENTION.workload(q, pool, ints(batch, pages), lens, lens, scale=128**-0.5)


def head(rows: int, *, sampled: bool) -> Workload:
    """Llama-3.2-1B's."""
    arrays = array(rows, 2048), array(2048), array(128256, 2048)
    if not sampled:
        return LM_HEAD.workload(*arrays, eps=1e-5)
    row = (array(rows, dtype=d) for d in (jnp.float32, jnp.uint32, jnp.int32))
    return LM_HEAD_SAMPLE.workload(*arrays, *row, eps=1e-5)


def measured_schedules(root: str | Path) -> Iterator[MeasuredSchedule]:
    """Yields the kernel results under `root` whose note names kernel and schedule."""
    results = [*read(root)]
    reads = [r.value * 1e12 for r in results if r.metric == "device_read_tb_per_s"]
    for result in results:
        yield from _of_result(result, reads[-1] if reads else 0.0)


def _of_result(result: Result, read_bytes_per_s: float) -> Iterator[MeasuredSchedule]:
    name = result.metric
    if found := re.fullmatch(r"kernel_matmul_1b_(\w+)_m(\d+)_us", name):
        workload = matmul(int(found[2]), *_MATMULS[found[1]])
        yield _row(name, result.note, workload, result.value, mixed=True)
    elif found := re.fullmatch(r"kernel_lm_head_sample_m(\d+)_us", name):
        rows = int(found[1])
        yield _row(name, result.note, head(rows, sampled=True), result.value, mixed=True)
        if result.baseline is not None and result.baseline.name.startswith("mosaic"):
            us = statistics.median(result.baseline.samples)
            bare = head(rows, sampled=False)
            yield _row(f"{name} baseline", result.baseline.name, bare, us, mixed=True)
    elif found := re.fullmatch(r"kernel_(gemv|paged_decode)_(\w+)_bandwidth_fraction", name):
        by_name = _GEMVS if found[1] == "gemv" else _ATTENTIONS
        sizes = by_name[found[2]]
        workload = matmul(1, *sizes) if found[1] == "gemv" else attention(*sizes)
        streamed = 2.0 * sizes[0] * sizes[1] * (1 if found[1] == "gemv" else 2 * 8 * 128)
        us = streamed / (result.value * read_bytes_per_s) * 1e6
        yield _row(name, result.note, workload, us, mixed=False)


def _row(name: str, note: str, workload: Workload, us: float, *, mixed: bool) -> MeasuredSchedule:
    """`note` is "kernel {schedule as JSON}"."""
    kernel_name, _, fields = note.partition(" ")
    kernel = CATALOGUE[kernel_name]
    schedule = kernel.schedule_type.from_json(json.loads(fields))
    return MeasuredSchedule(name, kernel, workload, schedule, us, mixed)
