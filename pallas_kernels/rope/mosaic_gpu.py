"""RoPE of [M,N,H], one head a block, for plans that do not fuse it into the QKV projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import f32
from pallas_kernels.row_kernel import HALF_ROWS, VECTOR, RowKernel, RowSchedule
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import ROPE


def head_start(row: Any, head: Any) -> tuple[Any, Any, int]:
    """First element of a block's output: the write map and the body's store."""
    return row, head, 0


@dataclasses.dataclass(frozen=True)
class HeadRope(RowKernel):
    def supports(self, workload: Workload) -> str | None:
        if workload.dtype("x") != jnp.bfloat16:
            return "x must be bfloat16"
        if workload["H"] not in (HALF_ROWS, 2 * HALF_ROWS):
            return f"head dim {workload['H']} is neither 64 nor 128"
        if workload["R"] != workload["H"]:
            return f"RoPE of {workload['R']} of {workload['H']} dims: only whole heads are rotated"
        return None

    def outputs(self, workload: Workload, schedule: RowSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["N"], workload["H"]),)

    def writes(self, workload: Workload, schedule: RowSchedule) -> Iterator[Writes]:
        for row in range(workload["M"]):
            for head in range(workload["N"]):
                yield Writes(0, head_start(row, head), (1, 1, workload["H"]))

    def build(self, workload: Workload, schedule: RowSchedule) -> Callable[..., Any]:
        dim = workload["H"]
        halves_apart = dim == 2 * HALF_ROWS

        def load(ref: Any, start: int) -> jax.Array:
            source = ref.at[pl.ds(start, HALF_ROWS)]
            return plgpu.load(source, layout=VECTOR, optimized=False).astype(f32)

        def rotate_halves(x_g: Any, angle_g: Any, out_g: Any) -> None:
            first, second = load(x_g, 0), load(x_g, HALF_ROWS)
            cos, sin = load(angle_g, 0), load(angle_g, HALF_ROWS)
            out_g[pl.ds(0, HALF_ROWS)] = (first * cos - second * sin).astype(jnp.bfloat16)
            out_g[pl.ds(HALF_ROWS, HALF_ROWS)] = (second * cos + first * sin).astype(jnp.bfloat16)

        def rotate_swapped(x_g: Any, angle_g: Any, out_g: Any, twice_s: Any) -> None:
            """64 dims are one vector: the halves are swapped by a load 32 further on of a copy."""
            half = dim // 2

            def around(vector: jax.Array, start: int) -> jax.Array:
                for i in range(2):
                    twice_s[pl.ds(i * HALF_ROWS, HALF_ROWS)] = vector
                return load(twice_s, start)

            x, angle = load(x_g, 0), load(angle_g, 0)
            index = plgpu.broadcasted_iota(jnp.int32, (HALF_ROWS,), 0, layout=VECTOR)
            lower = index < half
            turned = around(angle, half)
            cos, sin = jnp.where(lower, angle, turned), jnp.where(lower, turned, angle)
            swapped = around(x, half)
            y = x * cos + swapped * jnp.where(lower, -sin, sin)
            out_g[...] = y.astype(jnp.bfloat16)

        def body(x_g: Any, cos_sin_g: Any, out_g: Any, **scratch: Any) -> None:
            schedule.wait()
            row, head, _ = head_start(jax.lax.axis_index("row"), jax.lax.axis_index("head"))
            refs = x_g.at[row, head], cos_sin_g.at[row], out_g.at[row, head]
            if halves_apart:
                rotate_halves(*refs)
            else:
                rotate_swapped(*refs, scratch["twice_s"])

        scratch = {} if halves_apart else {"twice_s": plgpu.SMEM((2 * HALF_ROWS,), f32)}
        shape = (workload["M"], workload["N"], dim)
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            scratch_types=scratch,
            grid=(workload["N"], workload["M"]),
            grid_names=("head", "row"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="rope",
        )


KERNEL = HeadRope("mosaic_gpu.rope.head", ROPE)
