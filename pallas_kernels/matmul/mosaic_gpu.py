"""Matmul x [M,K] @ w[N,K].T (+ bias) (+ residual): as a weight stream, and as a direct GEMV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

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
    store_tile,
)
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import MATMUL


def tile_slices(tile: Any, columns: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """(start, size) along M and N of one tile's output: the write map and the body's stores."""
    return (0, columns), (tile * MMA_ROWS, MMA_ROWS)


def out_dtype(workload: Workload) -> jnp.dtype:
    return jnp.dtype(workload.option("out_dtype") or workload.dtype("x"))


def has(workload: Workload, argument: str) -> bool:
    return argument in dict(workload.dtypes)


@dataclasses.dataclass(frozen=True)
class StreamMatmul(StreamKernel):
    def supports(self, workload: Workload) -> str | None:
        columns = workload["N"]
        if columns % 8 or columns < MMA_ROWS:
            return f"N={columns} is no multiple of 8 of at least {MMA_ROWS}"
        if has(workload, "bias") and columns % MMA_ROWS:
            return f"with a bias N={columns} must be a multiple of {MMA_ROWS}"
        return unsupported(workload, workload["M"], workload["K"], "x", "w")

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        tiles = -(-workload["N"] // MMA_ROWS)
        return Stream(workload["M"], 1, tiles, workload["K"], schedule, False)

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["N"]),)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        for tile in range(stream.tiles):
            starts, sizes = zip(*tile_slices(tile, stream.columns), strict=True)
            yield clipped((workload["M"], workload["N"]), starts, sizes)

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        has_bias, has_residual = has(workload, "bias"), has(workload, "residual")
        scratch_types = stream.scratch() | {"out_s": staging(stream.columns, out_dtype(workload))}
        if has_residual:
            scratch_types["residual_s"] = staging(stream.columns, workload.dtype("residual"))
            scratch_types["residual_ready"] = plgpu.Barrier()

        def body(*refs: Any, **scratch: Any) -> None:
            x_g, w_g, *rest, out_g = refs
            bias_g = rest.pop(0) if has_bias else None
            residual_g = rest.pop(0) if has_residual else None

            def block(ref: Any, tile: Any) -> Any:
                return ref.at[tuple(pl.ds(*s) for s in tile_slices(tile, stream.columns))]

            def load(tile: Any, k: Any, destination: Any, barrier: Any) -> None:
                rows = pl.ds(tile * MMA_ROWS, MMA_ROWS)
                source = w_g.at[rows, pl.ds(k, schedule.tile_k)]
                plgpu.copy_gmem_to_smem(source, destination.at[0], barrier)

            def before_tile(tile: Any) -> None:
                source, ready = block(residual_g, tile), scratch["residual_ready"]
                plgpu.copy_gmem_to_smem(source, scratch["residual_s"], ready)

            def epilogue(tile: Any, sums: list[jax.Array]) -> None:
                (y,) = sums
                if bias_g is not None:
                    bias = bias_g.at[pl.ds(tile * MMA_ROWS, MMA_ROWS)]
                    bias = plgpu.load(bias, layout=PER_ROW, optimized=False).astype(f32)
                    y = y + jax.lax.broadcast_in_dim(bias, y.shape, (0,))
                if residual_g is not None:
                    plgpu.barrier_wait(scratch["residual_ready"])
                    y = y + load_staged(scratch["residual_s"])
                store_tile(y, scratch["out_s"], block(out_g, tile))

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
        has_bias, has_residual = has(workload, "bias"), has(workload, "residual")

        def body(x_g: Any, w_g: Any, *rest: Any) -> None:
            *optional, out_g = rest
            bias_g = optional.pop(0) if has_bias else None
            residual_g = optional.pop(0) if has_residual else None
            first = gemv.first_output(jax.lax.axis_index("block"))

            def addends() -> list[list[Any]]:
                """Bias and residual of every output, loaded before the products hide their latency."""
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
