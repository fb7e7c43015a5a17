"""RoPE of [M,N,H], for plans that do not fuse it: all heads of a block of rows a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.base import clipped
from pallas_kernels.tpu_base import RESERVED_BYTES, bf16, f32, not_bfloat16, pallas_call, vmem_bytes
from pallas_kernels.tpu_rows import TpuRowKernel, TpuRowSchedule, rotated, whole_head_angles
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import ROPE


def head_rows(step: Any) -> tuple[int, Any, int]:
    """A step's block of the output [N,M,H]: the write map and the block's index."""
    return 0, step, 0


@dataclasses.dataclass(frozen=True)
class RowRope(TpuRowKernel):
    def supports(self, workload: Workload) -> str | None:
        if workload["R"] > workload["H"] or workload["R"] % 2:
            return f"RoPE of {workload['R']} of {workload['H']} dims"
        return not_bfloat16(workload, "x")

    def shared_memory_bytes(self, workload: Workload, schedule: TpuRowSchedule) -> int:
        rows, heads, dim = self.block(workload, schedule), workload["N"], workload["H"]
        buffers = 4 * vmem_bytes(heads, rows, dim, dtype=bf16)
        buffers += 4 * vmem_bytes(rows, dim, dtype=f32) + 2 * vmem_bytes(dim, dim, dtype=f32)
        return buffers + 3 * vmem_bytes(rows, dim, dtype=f32) + RESERVED_BYTES

    def outputs(self, workload: Workload, schedule: TpuRowSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["N"], workload["M"], workload["H"]),)

    def writes(self, workload: Workload, schedule: TpuRowSchedule) -> Iterator[Writes]:
        (shape,), rows = self.outputs(workload, schedule), self.block(workload, schedule)
        for step in range(self.grid(workload, schedule)[0]):
            head, block, dim = head_rows(step)
            yield clipped(shape, (head, block * rows, dim), (shape[0], rows, shape[2]))

    def build(self, workload: Workload, schedule: TpuRowSchedule) -> Callable[..., Any]:
        rows, heads = self.block(workload, schedule), workload["N"]
        dim, rotary = workload["H"], workload["R"]
        blocks = pl.BlockSpec((heads, rows, dim), head_rows)
        angles = pl.BlockSpec((rows, dim), lambda step: (step, 0))

        def body(x_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
            cos, sin = cos_ref[...], sin_ref[...]
            for head in range(heads):
                out_ref[head] = rotated(x_ref[head], cos, sin, rotary)

        call = pallas_call(
            body,
            grid=self.grid(workload, schedule),
            in_specs=[blocks, angles, angles],
            out_specs=blocks,
            out_shape=jax.ShapeDtypeStruct((heads, workload["M"], dim), bf16),
            compiler_params=self.params(workload, schedule, self.semantics(schedule)),
            name="rope",
        )

        def rope(x: Any, cos_sin: Any) -> jax.Array:
            by_head = call(x.transpose(1, 0, 2), *whole_head_angles(cos_sin, dim))
            return by_head.transpose(1, 0, 2)

        return rope


KERNEL = RowRope("mosaic_tpu.rope.row", ROPE)
