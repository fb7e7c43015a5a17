"""RMSNorm of [M,D], one row a block, for plans that do not fuse it into the next matmul."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.base import f32
from pallas_kernels.row_kernel import (
    REDUCTION_SCRATCH_BYTES,
    RowKernel,
    RowSchedule,
    strided,
    unsupported_row,
)
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import RMS_NORM


def row_start(block: Any) -> tuple[Any, int]:
    """First element of a block's output: the write map and the body's store."""
    return block, 0


@dataclasses.dataclass(frozen=True)
class RowRmsNorm(RowKernel):
    def supports(self, workload: Workload) -> str | None:
        return unsupported_row(workload, workload["D"], "x", "weight")

    def outputs(self, workload: Workload, schedule: RowSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["D"]),)

    def writes(self, workload: Workload, schedule: RowSchedule) -> Iterator[Writes]:
        for block in range(workload["M"]):
            yield Writes(0, row_start(block), (1, workload["D"]))

    def build(self, workload: Workload, schedule: RowSchedule) -> Callable[..., Any]:
        layout, eps, length = strided(workload["D"]), workload.option("eps"), workload["D"]

        def body(x_g: Any, weight_g: Any, out_g: Any) -> None:
            row, _ = row_start(jax.lax.axis_index("block"))
            weight = plgpu.load(weight_g, layout=layout).astype(f32)
            schedule.wait()
            x = plgpu.load(x_g.at[row], layout=layout).astype(f32)
            scale = jax.lax.rsqrt(jnp.sum(x * x) / length + eps)
            out_g.at[row][...] = (x * scale * weight).astype(jnp.bfloat16)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], length), jnp.bfloat16),
            grid=(workload["M"],),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES
            ),
            kernel_name="rms_norm",
        )


KERNEL = RowRmsNorm("mosaic_gpu.rms_norm.row", RMS_NORM)
