"""Matrix-vector products on the CUDA cores: weights go from global memory straight to registers.

A block of one warpgroup owns `rows` weight rows of each group (gate and up: two groups), keeps one
float32 partial sum per lane and row, and reduces once at the end. Meant for one to four activation
rows, where the tensor cores have nothing to gain; nothing passes through shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import (
    REGISTERS_PER_THREAD,
    WARPGROUP_THREADS,
    MosaicGpuKernel,
    f32,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Schedule, Workload, Writes

MAX_ROWS = 4  # activation rows; more spill registers before they pay
REDUCTION_SCRATCH_BYTES = 2048
UNROLLED = 1024  # columns whose loads the compiler issues together where steps are shorter


@dataclasses.dataclass(frozen=True)
class GemvSchedule(Schedule):
    """`rows` weight rows a block, `tile_k` columns a step, `lookahead` steps loaded early."""

    rows: int = 4
    tile_k: int = 1024
    lookahead: int = 0
    dependent_launch: bool = False


@dataclasses.dataclass(frozen=True)
class Gemv:
    """The geometry: weights [groups, outputs, depth] times `activations` rows [depth]."""

    activations: int
    groups: int
    outputs: int
    depth: int
    schedule: GemvSchedule
    normalised: bool

    @property
    def vector(self) -> int:
        """Elements a lane loads at once: 16 bytes of bfloat16 where the step is long enough."""
        return min(8, self.schedule.tile_k // WARPGROUP_THREADS)

    def first_output(self, block: Any) -> Any:
        """First output of a block: the write map and the body's stores."""
        return block * self.schedule.rows

    def illegal(self, chip: ChipSpec) -> str | None:
        s = self.schedule
        if s.tile_k % (2 * WARPGROUP_THREADS):
            return f"tile_k={s.tile_k} is no multiple of {2 * WARPGROUP_THREADS}"
        if self.depth % s.tile_k:
            return f"K={self.depth} is no multiple of tile_k={s.tile_k}"
        if self.outputs % s.rows:
            return f"{self.outputs} outputs are no multiple of rows={s.rows}"
        if s.lookahead not in (0, 1):
            return f"lookahead={s.lookahead} is neither 0 nor 1"
        if s.lookahead and self.depth // s.tile_k < 2:
            return "lookahead needs at least two steps"
        if self.registers > REGISTERS_PER_THREAD:
            return f"about {self.registers} registers a thread, the limit is {REGISTERS_PER_THREAD}"
        return None

    @property
    def registers(self) -> int:
        """Of a thread: partial sums and activations in float32, weights in bfloat16, addresses."""
        s, weights = self.schedule, self.groups * self.schedule.rows
        sums = self.activations * (weights + 1 + self.normalised)
        return s.tile_k // WARPGROUP_THREADS * (sums + weights * (1 + s.lookahead) // 2) + 30

    def launch_shape(self) -> LaunchShape:
        """What a block and all blocks together do, for cost models."""
        s, rows = self.schedule, self.groups * self.schedule.rows
        blocks = self.outputs // s.rows
        return LaunchShape(
            blocks,
            WARPGROUP_THREADS,
            self.registers,
            float(blocks * rows * 2 * self.depth),  # activations stay in the first-level cache
            float(2 * min(self.depth, max(s.tile_k * (1 + s.lookahead), UNROLLED)) * rows),
            steps=self.depth // s.tile_k,
            reductions=self.activations * (rows + self.normalised),
            vector_ops=float(self.depth * (rows * (1 + self.activations) + self.activations)),
        )

    def run(
        self,
        x_g: Any,
        weight_row: Callable[[int, Any], Any],
        norm_g: Any = None,
        eps: float = 0.0,
        early: Callable[[], Any] = lambda: None,
    ) -> tuple[list[list[list[jax.Array]]], Any]:
        """Returns the scalar sums [activation][group][row] of this block, and `early()`'s result.

        `weight_row(group, row)` is the [depth] reference of a weight row; `row` counts from 0 in
        the block. `early` runs before the products, once the previous kernel's results may be read.
        """
        s = self.schedule
        layout = plgpu.Layout.WG_STRIDED((s.tile_k,), self.vector)

        def load(ref: Any, step: Any) -> jax.Array:
            return plgpu.load(ref.at[pl.ds(step * s.tile_k, s.tile_k)], layout=layout)

        def weights(step: Any) -> list[jax.Array]:
            return [load(weight_row(g, r), step) for g in range(self.groups) for r in range(s.rows)]

        def multiply(w: list[jax.Array], step: Any, state: Any) -> Any:
            sums, squares = state
            x = [load(x_g.at[m], step).astype(f32) for m in range(self.activations)]
            if norm_g is not None:
                squares = [q + v * v for q, v in zip(squares, x, strict=True)]
                scale = load(norm_g, step).astype(f32)
                x = [v * scale for v in x]
            w = [v.astype(f32) for v in w]
            sums = [
                [t + v * xm for t, v in zip(row, w, strict=True)]
                for row, xm in zip(sums, x, strict=True)
            ]
            return sums, squares

        zero = plgpu.layout_cast(jnp.zeros((s.tile_k,), f32), layout)
        state = (
            [[zero] * (self.groups * s.rows)] * self.activations,
            [zero] * (self.activations if norm_g is not None else 0),
        )
        first = weights(0)  # weights do not depend on the kernel before, activations do
        if s.dependent_launch:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        loaded = early()
        steps = self.depth // s.tile_k
        if s.lookahead:

            def advance(step: Any, carry: Any) -> Any:
                w, state = carry
                following = weights(step + 1)
                return following, multiply(w, step, state)

            last, state = jax.lax.fori_loop(0, steps - 1, advance, (first, state))
            state = multiply(last, steps - 1, state)
        else:
            state = multiply(first, 0, state)
            state = jax.lax.fori_loop(1, steps, lambda k, st: multiply(weights(k), k, st), state)
        return self._reduce(state, eps), loaded

    def _reduce(self, state: Any, eps: float) -> list[list[list[jax.Array]]]:
        sums, squares = state
        results = []
        for m in range(self.activations):
            scale = jax.lax.rsqrt(jnp.sum(squares[m]) / self.depth + eps) if squares else None
            values = [jnp.sum(t) if scale is None else jnp.sum(t) * scale for t in sums[m]]
            rows = self.schedule.rows
            results.append([values[g * rows : (g + 1) * rows] for g in range(self.groups)])
        return results

    def launch(self) -> dict[str, Any]:
        """Keyword arguments of `plgpu.kernel` that follow from the schedule."""
        params = plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES
        )
        return {
            "grid": (self.outputs // self.schedule.rows,),
            "grid_names": ("block",),
            "compiler_params": params,
        }


@dataclasses.dataclass(frozen=True)
class GemvKernel(MosaicGpuKernel):
    """A kernel whose body is `Gemv.run`. A subclass gives `gemv`, `outputs` and `build`."""

    requires: frozenset[str] = frozenset({"bf16"})
    schedule_type: ClassVar[type[GemvSchedule]] = GemvSchedule

    def gemv(self, workload: Workload, schedule: GemvSchedule) -> Gemv:
        """The geometry of the product."""
        raise NotImplementedError

    def supports(self, workload: Workload) -> str | None:
        gemv = self.gemv(workload, GemvSchedule())
        if workload.dtype("x") != jnp.bfloat16 or workload.dtype("w") != jnp.bfloat16:
            return "x and w must be bfloat16"
        if gemv.activations > MAX_ROWS:
            return f"M={gemv.activations} exceeds {MAX_ROWS} rows"
        return None if gemv.depth % 256 == 0 else f"K={gemv.depth} is no multiple of 256"

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[GemvSchedule]:
        for rows in (1, 2, 4, 8, 16):
            for tile_k in (256, 512, 1024, 2048, 4096):
                for lookahead in (0, 1):
                    for dependent in (False, True):
                        yield GemvSchedule(rows, tile_k, lookahead, dependent)

    def default(self, workload: Workload, chip: ChipSpec) -> GemvSchedule:
        """About 128 bytes in flight a lane, in a grid that fills the chip at least twice.

        Measured on an H200: 8 rows of 1024 columns for long reductions, 4 for short ones.
        """
        legal = [
            s
            for s in self.space(workload, chip)
            if not (s.dependent_launch or s.lookahead or self.illegal(workload, s, chip))
        ]
        if not legal:  # `check` names the reason
            return GemvSchedule(1, 256)
        return max(legal, key=lambda s: self.rank(workload, s, chip))

    def rank(self, workload: Workload, schedule: GemvSchedule, chip: ChipSpec) -> tuple[Any, ...]:
        s, gemv = schedule, self.gemv(workload, schedule)
        in_flight = s.rows * gemv.groups * s.tile_k
        target = 8192 if gemv.depth > 4096 else 4096
        fills = gemv.outputs // s.rows >= 2 * chip.num_sms
        return fills, not s.lookahead, -abs(in_flight - target), -abs(s.tile_k - 1024)

    def family(self, schedule: GemvSchedule) -> tuple[Any, ...]:
        return (schedule.rows,)

    def illegal(self, workload: Workload, schedule: GemvSchedule, chip: ChipSpec) -> str | None:
        return self.gemv(workload, schedule).illegal(chip)

    def launch_shape(self, workload: Workload, schedule: GemvSchedule) -> LaunchShape:
        return self.gemv(workload, schedule).launch_shape()

    def shared_memory_bytes(self, workload: Workload, schedule: GemvSchedule) -> int:
        return REDUCTION_SCRATCH_BYTES

    def writing(self, schedule: GemvSchedule) -> Any:
        return schedule.rows

    def plain(self, schedule: GemvSchedule) -> GemvSchedule:
        return dataclasses.replace(schedule, dependent_launch=False)

    def writes(self, workload: Workload, schedule: GemvSchedule) -> Iterator[Writes]:
        gemv = self.gemv(workload, schedule)
        for block in range(gemv.outputs // schedule.rows):
            start = (0, gemv.first_output(block))
            yield Writes(0, start, (gemv.activations, schedule.rows))
