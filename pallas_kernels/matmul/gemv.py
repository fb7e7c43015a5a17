"""Matmul of one to four rows on the CUDA cores (see pallas_kernels/gemv.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.base import MosaicGpuKernel, f32
from pallas_kernels.gemv import (
    MAX_ROWS,
    REDUCTION_SCRATCH_BYTES,
    Gemv,
    GemvSchedule,
    gemv_default,
    gemv_space,
)
from polyjax.core.op import ChipLike, Workload, Writes
from polyjax.core.ops import MATMUL


def first_output(block: Any, rows: int) -> Any:
    """First output of a block: the write map and the body's stores."""
    return block * rows


@dataclasses.dataclass(frozen=True)
class GemvMatmul(MosaicGpuKernel):
    schedule_type: ClassVar[type[GemvSchedule]] = GemvSchedule

    def supports(self, workload: Workload) -> str | None:
        if workload.dtype("x") != jnp.bfloat16 or workload.dtype("w") != jnp.bfloat16:
            return "x and w must be bfloat16"
        if workload["M"] > MAX_ROWS:
            return f"M={workload['M']} exceeds {MAX_ROWS} rows"
        return None if workload["K"] % 256 == 0 else f"K={workload['K']} is no multiple of 256"

    def _gemv(self, workload: Workload, schedule: GemvSchedule) -> Gemv:
        return Gemv(workload["M"], 1, workload["N"], workload["K"], schedule, False)

    def space(self, workload: Workload, chip: ChipLike) -> Iterator[GemvSchedule]:
        return gemv_space(chip)

    def default(self, workload: Workload, chip: ChipLike) -> GemvSchedule:
        return gemv_default(self._gemv(workload, GemvSchedule()), chip)

    def illegal(self, workload: Workload, schedule: GemvSchedule, chip: ChipLike) -> str | None:
        return self._gemv(workload, schedule).illegal(chip)

    def shared_memory_bytes(self, workload: Workload, schedule: GemvSchedule) -> int:
        return REDUCTION_SCRATCH_BYTES

    def plain(self, schedule: GemvSchedule) -> GemvSchedule:
        return dataclasses.replace(schedule, dependent_launch=False)

    def outputs(self, workload: Workload, schedule: GemvSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["N"]),)

    def writes(self, workload: Workload, schedule: GemvSchedule) -> Iterator[Writes]:
        for block in range(workload["N"] // schedule.rows):
            yield Writes(0, (0, first_output(block, schedule.rows)), (workload["M"], schedule.rows))

    def build(self, workload: Workload, schedule: GemvSchedule) -> Callable[..., Any]:
        gemv = self._gemv(workload, schedule)
        out_dtype = jnp.dtype(workload.option("out_dtype") or workload.dtype("x"))
        given = dict(workload.dtypes)

        def body(x_g: Any, w_g: Any, *rest: Any) -> None:
            *optional, out_g = rest
            bias_g = optional.pop(0) if "bias" in given else None
            residual_g = optional.pop(0) if "residual" in given else None
            first = first_output(jax.lax.axis_index("block"), schedule.rows)
            sums = gemv.run(x_g, lambda _, row: w_g.at[first + row])
            for m, (values,) in enumerate(sums):
                for row, value in enumerate(values):
                    if bias_g is not None:
                        value += bias_g[first + row].astype(f32)
                    if residual_g is not None:
                        value += residual_g[m, first + row].astype(f32)
                    out_g[m, first + row] = value.astype(out_dtype)

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["N"]), out_dtype),
            kernel_name="matmul_gemv",
            **gemv.launch(),
        )

        def matmul(x: Any, w: Any, bias: Any = None, residual: Any = None) -> jax.Array:
            return kernel(*[a for a in (x, w, bias, residual) if a is not None])

        return matmul


KERNEL = GemvMatmul("mosaic_gpu.matmul.gemv", MATMUL, frozenset({"bf16"}))
