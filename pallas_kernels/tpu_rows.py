"""Kernels that take blocks of activation rows through VMEM, and the rotation of heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.base import clipped
from pallas_kernels.tpu_base import (
    STEP_US,
    MosaicTpuKernel,
    bf16,
    f32,
    i32,
    illegal_rows,
    row_blocks,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Schedule, Workload, Writes


@dataclasses.dataclass(frozen=True)
class TpuRowSchedule(Schedule):
    """`rows` a step, 0 for all of them; with `parallel` the steps may run on different cores."""

    rows: int = 0
    parallel: bool = False


def row_start(step: Any, *_: Any) -> tuple[Any, int]:
    """A step's block of an output [M,D]: the write map and the block's index."""
    return step, 0


@dataclasses.dataclass(frozen=True)
class TpuRowKernel(MosaicTpuKernel):
    """A subclass gives `supports`, `shared_memory_bytes`, `build`, and its writes if not [M,D]."""

    schedule_type: ClassVar[type[TpuRowSchedule]] = TpuRowSchedule
    may_run_parallel: ClassVar[bool] = True

    def block(self, workload: Workload, schedule: TpuRowSchedule) -> int:
        """Rows of one step."""
        return schedule.rows or workload["M"]

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[TpuRowSchedule]:
        for rows in (0, 16, 32, 64, 128, 256):
            for parallel in (False, True) if self.may_run_parallel else (False,):
                yield TpuRowSchedule(rows, parallel)

    def rank(self, workload: Workload, schedule: TpuRowSchedule, chip: ChipSpec) -> tuple[Any, ...]:
        """Least time of the first block, which nothing hides, and of the steps."""
        steps = self.grid(workload, schedule)[0]
        moved = self.op.bytes_moved(workload) if self.op.bytes_moved else 0.0
        shares = min(steps, chip.num_sms) if schedule.parallel else 1
        exposed_us = moved / steps / chip.hbm_bytes_per_s * 1e6
        return -exposed_us - steps / shares * STEP_US, schedule.parallel

    def illegal(self, workload: Workload, schedule: TpuRowSchedule, chip: ChipSpec) -> str | None:
        if schedule.parallel and not self.may_run_parallel:
            return "its steps must keep their order"
        return illegal_rows(workload["M"], self.block(workload, schedule))

    def outputs(self, workload: Workload, schedule: TpuRowSchedule) -> tuple[tuple[int, ...], ...]:
        """One array [M,D], unless the op says otherwise."""
        return ((workload["M"], workload["D"]),)

    def writes(self, workload: Workload, schedule: TpuRowSchedule) -> Iterator[Writes]:
        ((count, width),), rows = self.outputs(workload, schedule), self.block(workload, schedule)
        for step in range(self.grid(workload, schedule)[0]):
            first, column = row_start(step)
            yield clipped((count, width), (first * rows, column), (rows, width))

    def writing(self, schedule: TpuRowSchedule) -> Any:
        return schedule.rows

    def grid(self, workload: Workload, schedule: TpuRowSchedule) -> tuple[int, ...]:
        return (row_blocks(workload["M"], self.block(workload, schedule)),)

    def semantics(self, schedule: TpuRowSchedule) -> tuple[str]:
        return ("parallel",) if schedule.parallel else ("arbitrary",)


def whole_head_angles(cos_sin: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos_sin [M,R] (cos | sin) -> float32 cosines and sines of every dim [M,H]; 1, 0 past R."""
    cos, sin = jnp.split(cos_sin.astype(f32), 2, axis=-1)
    rest = head_dim - cos_sin.shape[-1]
    pad = ((0, 0), (0, rest))
    return (
        jnp.pad(jnp.concatenate([cos, cos], -1), pad, constant_values=1.0),
        jnp.pad(jnp.concatenate([sin, sin], -1), pad),
    )


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, rotary: int) -> jax.Array:
    """RoPE of one head's rows: x bfloat16, cos, sin float32 [M,H] of `whole_head_angles`.

    Swapping halves moves lanes, at distances that differ by head size; a product with a matrix of
    one +-1 a column does it for every size and is exact.
    """
    dim, half = x.shape[-1], rotary // 2
    source = jax.lax.broadcasted_iota(i32, (dim, dim), 0)
    target = jax.lax.broadcasted_iota(i32, (dim, dim), 1)
    lower = jnp.logical_and(target < half, source == target + half)
    upper = jnp.logical_and(
        jnp.logical_and(target >= half, target < rotary), source == target - half
    )
    swap = jnp.where(upper, 1.0, 0.0) - jnp.where(lower, 1.0, 0.0)
    turned = jnp.dot(x, swap.astype(bf16), preferred_element_type=f32)
    return (x.astype(f32) * cos + turned * sin).astype(x.dtype)
