"""Matmul x [M,K] @ w[N,K].T (+ bias) (+ residual): as a weight stream, and as a direct GEMV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, clipped, f32
from pallas_kernels.gemv import Gemv, GemvKernel, GemvSchedule
from pallas_kernels.stream_kernel import StreamKernel, unsupported
from pallas_kernels.weight_stream import (
    PER_ROW,
    Stream,
    StreamSchedule,
    load_staged,
    staging,
    store_tiles,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import MATMUL


def tile_slices(tile: Any, columns: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """(start, size) along M and N of 64 outputs: the write map and the body's stores."""
    return (0, columns), (tile * MMA_ROWS, MMA_ROWS)


def out_dtype(workload: Workload) -> jnp.dtype:
    return jnp.dtype(workload.option("out_dtype") or workload.dtype("x"))


@dataclasses.dataclass(frozen=True)
class StreamMatmul(StreamKernel):
    tile_rows: ClassVar[tuple[int, ...]] = (MMA_ROWS, 2 * MMA_ROWS)

    def supports(self, workload: Workload) -> str | None:
        columns = workload["N"]
        if columns % 8 or columns < MMA_ROWS:
            return f"N={columns} is no multiple of 8 of at least {MMA_ROWS}"
        if workload.has("bias") and columns % MMA_ROWS:
            return f"with a bias N={columns} must be a multiple of {MMA_ROWS}"
        return unsupported(workload, workload["M"], workload["K"], "x", "w")

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        groups = schedule.tile_rows // MMA_ROWS
        tiles = -(-workload["N"] // schedule.tile_rows)
        return Stream(workload["M"], groups, tiles, workload["K"], schedule, False, groups)

    def illegal(self, workload: Workload, schedule: StreamSchedule, chip: ChipSpec) -> str | None:
        if schedule.tile_rows > MMA_ROWS and workload["N"] % schedule.tile_rows:
            return f"N={workload['N']} is no multiple of tile_rows={schedule.tile_rows}"
        return super().illegal(workload, schedule, chip)

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["N"]),)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        for tile in range(stream.tiles * stream.groups):
            starts, sizes = zip(*tile_slices(tile, stream.columns), strict=True)
            yield clipped((workload["M"], workload["N"]), starts, sizes)

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        has_bias, has_residual = workload.has("bias"), workload.has("residual")
        scratch_types = stream.scratch() | {
            "out_s": staging(stream.groups, stream.columns, out_dtype(workload))
        }
        if has_residual:
            residual = staging(stream.groups, stream.columns, workload.dtype("residual"))
            scratch_types["residual_s"] = residual
            scratch_types["residual_ready"] = plgpu.Barrier(num_arrivals=stream.groups)

        def body(*refs: Any, **scratch: Any) -> None:
            x_g, w_g, *rest, out_g = refs
            bias_g = rest.pop(0) if has_bias else None
            residual_g = rest.pop(0) if has_residual else None

            def block(ref: Any, tile: Any) -> Any:
                return ref.at[tuple(pl.ds(*s) for s in tile_slices(tile, stream.columns))]

            def load(tile: Any, k: Any, destination: Any, barrier: Any) -> None:
                for i, part in enumerate(parts(tile)):
                    rows = pl.ds(part * MMA_ROWS, MMA_ROWS)
                    source = w_g.at[rows, pl.ds(k, schedule.tile_k)]
                    plgpu.copy_gmem_to_smem(source, destination.at[i], barrier)

            def parts(tile: Any) -> list[Any]:
                return [tile * stream.groups + i for i in range(stream.groups)]

            def before_tile(tile: Any) -> None:
                for i, part in enumerate(parts(tile)):
                    source, ready = block(residual_g, part), scratch["residual_ready"]
                    plgpu.copy_gmem_to_smem(source, scratch["residual_s"].at[i], ready)

            def epilogue(tile: Any, sums: list[jax.Array]) -> None:
                sums = list(sums)
                if residual_g is not None:
                    plgpu.barrier_wait(scratch["residual_ready"])
                for i, part in enumerate(parts(tile)):
                    if bias_g is not None:
                        bias = bias_g.at[pl.ds(part * MMA_ROWS, MMA_ROWS)]
                        bias = plgpu.load(bias, layout=PER_ROW, optimized=False).astype(f32)
                        sums[i] = sums[i] + jax.lax.broadcast_in_dim(bias, sums[i].shape, (0,))
                    if residual_g is not None:
                        sums[i] = sums[i] + load_staged(scratch["residual_s"].at[i])
                store_tiles(sums, scratch["out_s"], [block(out_g, part) for part in parts(tile)])

            prefetch = before_tile if has_residual else None
            stream.run(x_g, load, epilogue, scratch, before_tile=prefetch)

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["N"]), out_dtype(workload)),
            scratch_types=scratch_types,
            kernel_name="matmul_stream",
            **stream.launch(),
        )
        return _drop_absent(kernel)


@dataclasses.dataclass(frozen=True)
class GemvMatmul(GemvKernel):
    def gemv(self, workload: Workload, schedule: GemvSchedule) -> Gemv:
        return Gemv(workload["M"], 1, workload["N"], workload["K"], schedule, False)

    def outputs(self, workload: Workload, schedule: GemvSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["N"]),)

    def build(self, workload: Workload, schedule: GemvSchedule) -> Callable[..., Any]:
        gemv = self.gemv(workload, schedule)
        has_bias, has_residual = workload.has("bias"), workload.has("residual")

        def body(x_g: Any, w_g: Any, *rest: Any) -> None:
            *optional, out_g = rest
            bias_g = optional.pop(0) if has_bias else None
            residual_g = optional.pop(0) if has_residual else None
            first = gemv.first_output(jax.lax.axis_index("block"))

            def addends() -> list[list[Any]]:
                """Bias and residual of every output, loaded before the products hide them."""
                rows = []
                for m in range(gemv.activations):
                    row: list[Any] = [0.0] * schedule.rows
                    for r in range(schedule.rows):
                        if bias_g is not None:
                            row[r] += bias_g[first + r].astype(f32)
                        if residual_g is not None:
                            row[r] += residual_g[m, first + r].astype(f32)
                    rows.append(row)
                return rows

            sums, added = gemv.run(x_g, lambda _, row: w_g.at[first + row], early=addends)
            for m, (values,) in enumerate(sums):
                for row, value in enumerate(values):
                    out_g[m, first + row] = (value + added[m][row]).astype(out_g.dtype)

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["N"]), out_dtype(workload)),
            kernel_name="matmul_gemv",
            **gemv.launch(),
        )
        return _drop_absent(kernel)


def _drop_absent(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The op's signature: absent optional arguments do not reach the kernel."""

    def matmul(x: Any, w: Any, bias: Any = None, residual: Any = None) -> jax.Array:
        return kernel(*[a for a in (x, w, bias, residual) if a is not None])

    return matmul


STREAM = StreamMatmul("mosaic_gpu.matmul.stream", MATMUL)
GEMV = GemvMatmul("mosaic_gpu.matmul.gemv", MATMUL)
