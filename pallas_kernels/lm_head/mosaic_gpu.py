"""Final RMSNorm and vocabulary projection to float32 logits, as a weight stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, clipped, f32
from pallas_kernels.stream_kernel import StreamKernel, unsupported, with_norm
from pallas_kernels.weight_stream import Stream, StreamSchedule, staging, store_tiles
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import LM_HEAD


def tile_slices(tile: Any, columns: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """(start, size) along M and V of one tile's logits: the write map and the body's stores."""
    return (0, columns), (tile * MMA_ROWS, MMA_ROWS)


def head_stream(workload: Workload, schedule: StreamSchedule) -> Stream:
    """The geometry of a vocabulary projection."""
    groups = schedule.tile_rows // MMA_ROWS
    tiles = -(-workload["V"] // schedule.tile_rows)
    normalised = not schedule.separate_norm
    return Stream(workload["M"], groups, tiles, workload["D"], schedule, normalised, groups)


def illegal_rows(workload: Workload, schedule: StreamSchedule) -> str | None:
    if schedule.tile_rows > MMA_ROWS and workload["V"] % schedule.tile_rows:
        return f"V={workload['V']} is no multiple of tile_rows={schedule.tile_rows}"
    return None


def load_rows(w_g: Any, tile: Any, k: Any, destination: Any, barrier: Any) -> None:
    """Copies one step's weights [groups, 64, tile_k] of a tile."""
    groups, _, tile_k = destination.shape
    for i in range(groups):
        rows = pl.ds((tile * groups + i) * MMA_ROWS, MMA_ROWS)
        plgpu.copy_gmem_to_smem(w_g.at[rows, pl.ds(k, tile_k)], destination.at[i], barrier)


def capped(logits: Any, soft_cap: float) -> Any:
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


@dataclasses.dataclass(frozen=True)
class StreamHead(StreamKernel):
    tile_rows: ClassVar[tuple[int, ...]] = (MMA_ROWS, 2 * MMA_ROWS)
    norms: ClassVar[tuple[bool, ...]] = (False, True)

    def supports(self, workload: Workload) -> str | None:
        if workload["V"] % 8 or workload["V"] < MMA_ROWS:
            return f"V={workload['V']} is no multiple of 8 of at least {MMA_ROWS}"
        return unsupported(workload, workload["M"], workload["D"], "x", "norm", "w")

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        return head_stream(workload, schedule)

    def illegal(self, workload: Workload, schedule: StreamSchedule, chip: ChipSpec) -> str | None:
        return illegal_rows(workload, schedule) or super().illegal(workload, schedule, chip)

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["V"]),)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        for tile in range(stream.tiles * stream.groups):
            starts, sizes = zip(*tile_slices(tile, stream.columns), strict=True)
            yield clipped((workload["M"], workload["V"]), starts, sizes)

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)

        def body(x_g: Any, *rest: Any, **scratch: Any) -> None:
            *norm, w_g, out_g = rest
            norm_g = norm[0] if norm else None

            def load(tile: Any, k: Any, destination: Any, barrier: Any) -> None:
                load_rows(w_g, tile, k, destination, barrier)

            def epilogue(tile: Any, sums: list[jax.Array]) -> None:
                logits = [capped(y, workload.option("soft_cap", 0.0)) for y in sums]
                blocks = []
                for i in range(stream.groups):
                    part = tile_slices(tile * stream.groups + i, stream.columns)
                    blocks.append(out_g.at[tuple(pl.ds(*s) for s in part)])
                store_tiles(logits, scratch["out_s"], blocks)

            stream.run(x_g, load, epilogue, scratch, norm_g, workload.option("eps"))

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["V"]), f32),
            scratch_types=stream.scratch() | {"out_s": staging(stream.groups, stream.columns, f32)},
            kernel_name="lm_head_stream",
            **stream.launch(),
        )
        return with_norm(kernel, schedule, workload.option("eps"))


STREAM = StreamHead("mosaic_gpu.lm_head.stream", LM_HEAD)
