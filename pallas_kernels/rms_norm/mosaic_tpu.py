"""RMSNorm of [M,D], a block of rows a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

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
from pallas_kernels.tpu_rows import TpuRowKernel, TpuRowSchedule, row_start
from polyjax.core.op import Workload
from polyjax.core.ops import RMS_NORM


@dataclasses.dataclass(frozen=True)
class RowRmsNorm(TpuRowKernel):
    def supports(self, workload: Workload) -> str | None:
        return not_bfloat16(workload, "x", "weight")

    def shared_memory_bytes(self, workload: Workload, schedule: TpuRowSchedule) -> int:
        rows, width = self.block(workload, schedule), workload["D"]
        buffers = 4 * vmem_bytes(rows, width, dtype=bf16) + 2 * vmem_bytes(1, width, dtype=bf16)
        return buffers + 3 * vmem_bytes(rows, width, dtype=f32) + RESERVED_BYTES

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
