"""Final RMSNorm and vocabulary projection to float32 logits, as a weight stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, clipped, f32
from pallas_kernels.stream_kernel import StreamKernel, unsupported
from pallas_kernels.weight_stream import Stream, StreamSchedule, staging, store_tile
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import LM_HEAD


def tile_slices(tile: Any, columns: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """(start, size) along M and V of one tile's logits: the write map and the body's stores."""
    return (0, columns), (tile * MMA_ROWS, MMA_ROWS)


def capped(logits: Any, soft_cap: float) -> Any:
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


@dataclasses.dataclass(frozen=True)
class StreamHead(StreamKernel):
    def supports(self, workload: Workload) -> str | None:
        if workload["V"] % 4 or workload["V"] < MMA_ROWS:  # TMA strides are multiples of 16 bytes
            return f"V={workload['V']} is no multiple of 4 of at least {MMA_ROWS}"
        return unsupported(workload, workload["M"], workload["D"], "x", "norm", "w")

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        tiles = -(-workload["V"] // MMA_ROWS)
        return Stream(workload["M"], 1, tiles, workload["D"], schedule, True)

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["V"]),)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        for tile in range(stream.tiles):
            starts, sizes = zip(*tile_slices(tile, stream.columns), strict=True)
            yield clipped((workload["M"], workload["V"]), starts, sizes)

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)

        def body(x_g: Any, norm_g: Any, w_g: Any, out_g: Any, **scratch: Any) -> None:
            def load(tile: Any, k: Any, destination: Any, barrier: Any) -> None:
                rows = pl.ds(tile * MMA_ROWS, MMA_ROWS)
                source = w_g.at[rows, pl.ds(k, schedule.tile_k)]
                plgpu.copy_gmem_to_smem(source, destination.at[0], barrier)

            def epilogue(tile: Any, sums: list[jax.Array]) -> None:
                rows, columns = (pl.ds(*s) for s in tile_slices(tile, stream.columns))
                logits = capped(sums[0], workload.option("soft_cap", 0.0))
                store_tile(logits, scratch["out_s"], out_g.at[rows, columns])

            stream.run(x_g, load, epilogue, scratch, norm_g, workload.option("eps"))

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["V"]), f32),
            scratch_types=stream.scratch() | {"out_s": staging(stream.columns, f32)},
            kernel_name="lm_head_stream",
            **stream.launch(),
        )


STREAM = StreamHead("mosaic_gpu.lm_head.stream", LM_HEAD)
