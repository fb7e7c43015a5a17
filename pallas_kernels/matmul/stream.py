"""Skinny matmul x [M,K] @ w[N,K].T (+ bias) (+ residual) as a weight stream (see weight_stream.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, MosaicGpuKernel, clipped, f32
from pallas_kernels.weight_stream import (
    PER_ROW,
    Stream,
    StreamSchedule,
    load_staged,
    staging,
    store_tile,
    stream_default,
    stream_space,
)
from polyjax.core.op import ChipLike, Workload, Writes
from polyjax.core.ops import MATMUL


def tile_slices(tile: Any, columns: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """(start, size) along M and N of the output block of one tile: the write map and the body's stores."""
    return (0, columns), (tile * MMA_ROWS, MMA_ROWS)


@dataclasses.dataclass(frozen=True)
class StreamMatmul(MosaicGpuKernel):
    schedule_type: ClassVar[type[StreamSchedule]] = StreamSchedule

    def supports(self, workload: Workload) -> str | None:
        if workload.dtype("x") != jnp.bfloat16 or workload.dtype("w") != jnp.bfloat16:
            return "x and w must be bfloat16"
        if workload["M"] > 256:
            return f"M={workload['M']} exceeds 256 rows"
        if workload["K"] % 64:
            return f"K={workload['K']} is no multiple of 64"
        if workload["N"] % 8 or workload["N"] < MMA_ROWS:
            return f"N={workload['N']} is no multiple of 8 of at least {MMA_ROWS}"
        if _has(workload, "bias") and workload["N"] % MMA_ROWS:
            return f"with a bias N={workload['N']} must be a multiple of {MMA_ROWS}"
        return None

    def _stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        return Stream(workload["M"], 1, -(-workload["N"] // MMA_ROWS), workload["K"], schedule, False)

    def space(self, workload: Workload, chip: ChipLike) -> Iterator[StreamSchedule]:
        tiles = -(-workload["N"] // MMA_ROWS)
        return stream_space(workload["M"], 1, tiles, workload["K"], False, chip)

    def default(self, workload: Workload, chip: ChipLike) -> StreamSchedule:
        tiles = -(-workload["N"] // MMA_ROWS)
        return stream_default(workload["M"], 1, tiles, workload["K"], False, chip)

    def illegal(self, workload: Workload, schedule: StreamSchedule, chip: ChipLike) -> str | None:
        return self._stream(workload, schedule).illegal(chip)

    def shared_memory_bytes(self, workload: Workload, schedule: StreamSchedule) -> int:
        return self._stream(workload, schedule).shared_memory_bytes()

    def plain(self, schedule: StreamSchedule) -> StreamSchedule:
        return dataclasses.replace(schedule, reduction="serial", dependent_launch=False)

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["N"]),)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        stream = self._stream(workload, schedule)
        for tile in range(stream.tiles):
            starts, sizes = zip(*tile_slices(tile, stream.columns), strict=True)
            yield clipped((workload["M"], workload["N"]), starts, sizes)

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self._stream(workload, schedule)
        out_dtype = jnp.dtype(workload.option("out_dtype") or workload.dtype("x"))
        has_bias, has_residual = _has(workload, "bias"), _has(workload, "residual")

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
                plgpu.copy_gmem_to_smem(block(residual_g, tile), scratch["residual_s"], scratch["residual_ready"])

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

            stream.run(x_g, load, epilogue, scratch, before_tile=before_tile if has_residual else None)

        scratch_types = stream.scratch() | {"out_s": staging(stream.columns, out_dtype)}
        if has_residual:
            scratch_types["residual_s"] = staging(stream.columns, workload.dtype("residual"))
            scratch_types["residual_ready"] = plgpu.Barrier()
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["N"]), out_dtype),
            scratch_types=scratch_types,
            kernel_name="matmul_stream",
            **stream.launch(),
        )

        def matmul(x: Any, w: Any, bias: Any = None, residual: Any = None) -> jax.Array:
            return kernel(*[a for a in (x, w, bias, residual) if a is not None])

        return matmul


def _has(workload: Workload, argument: str) -> bool:
    return argument in dict(workload.dtypes)


KERNEL = StreamMatmul("mosaic_gpu.matmul.stream", MATMUL, frozenset({"tma", "wgmma", "cluster", "bf16"}))
