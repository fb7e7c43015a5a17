"""RMSNorm of [M,D], a block of rows a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.base import clipped
from pallas_kernels.tpu_base import (
    RESERVED_BYTES,
    bf16,
    f32,
    normalised,
    not_bfloat16,
    pallas_call,
    vmem_bytes,
    whole,
)
from pallas_kernels.tpu_rows import TpuRowKernel, TpuRowSchedule
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import RMS_NORM


def row_start(step: Any) -> tuple[Any, int]:
    """A step's block of the output: the write map and the block's index."""
    return step, 0


@dataclasses.dataclass(frozen=True)
class RowRmsNorm(TpuRowKernel):
    def supports(self, workload: Workload) -> str | None:
        return not_bfloat16(workload, "x", "weight")

    def shared_memory_bytes(self, workload: Workload, schedule: TpuRowSchedule) -> int:
        rows, width = self.block(workload, schedule), workload["D"]
        buffers = 4 * vmem_bytes(rows, width, dtype=bf16) + 2 * vmem_bytes(1, width, dtype=bf16)
        return buffers + 3 * vmem_bytes(rows, width, dtype=f32) + RESERVED_BYTES

    def outputs(self, workload: Workload, schedule: TpuRowSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["D"]),)

    def writes(self, workload: Workload, schedule: TpuRowSchedule) -> Iterator[Writes]:
        shape, rows = (workload["M"], workload["D"]), self.block(workload, schedule)
        for step in range(self.grid(workload, schedule)[0]):
            first, column = row_start(step)
            yield clipped(shape, (first * rows, column), (rows, workload["D"]))

    def build(self, workload: Workload, schedule: TpuRowSchedule) -> Callable[..., Any]:
        eps, width = workload.option("eps"), workload["D"]
        rows = pl.BlockSpec((self.block(workload, schedule), width), row_start)

        def body(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
            out_ref[...] = normalised(x_ref[...], weight_ref[...], eps)

        call = pallas_call(
            body,
            grid=self.grid(workload, schedule),
            in_specs=[rows, whole(1, width)],
            out_specs=rows,
            out_shape=jax.ShapeDtypeStruct((workload["M"], width), bf16),
            compiler_params=self.params(workload, schedule, self.semantics(schedule)),
            name="rms_norm",
        )
        return lambda x, weight: call(x, weight[None])


KERNEL = RowRmsNorm("mosaic_tpu.rms_norm.row", RMS_NORM)
