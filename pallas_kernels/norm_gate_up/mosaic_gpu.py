"""RMSNorm, gate and up projections and the gated activation in one kernel.

Gate rows are w[0], up rows w[1]: a block multiplies a tile of each with the same activations and
combines the two sums in its epilogue.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, clipped
from pallas_kernels.gemv import Gemv, GemvKernel, GemvSchedule
from pallas_kernels.stream_kernel import StreamKernel, unsupported, with_norm
from pallas_kernels.weight_stream import Stream, StreamSchedule, staging, store_tiles
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import NORM_GATE_UP

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda x: x / (1.0 + jnp.exp(-x)),
    # tanh form of Hendrycks and Gimpel 2016, Gaussian Error Linear Units
    "gelu_pytorch_tanh": lambda x: (
        0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    ),
}


def tile_slices(tile: Any, columns: int) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """(start, size) along M and F of one tile's output: the write map and the body's stores."""
    return (0, columns), (tile * MMA_ROWS, MMA_ROWS)


def _unsupported_activation(workload: Workload) -> str | None:
    name = workload.option("activation", "silu")
    return None if name in ACTIVATIONS else f"activation {name!r} is none of {sorted(ACTIVATIONS)}"


@dataclasses.dataclass(frozen=True)
class StreamGateUp(StreamKernel):
    norms: ClassVar[tuple[bool, ...]] = (False, True)

    def supports(self, workload: Workload) -> str | None:
        if workload["F"] % 8 or workload["F"] < MMA_ROWS:
            return f"F={workload['F']} is no multiple of 8 of at least {MMA_ROWS}"
        reason = _unsupported_activation(workload)
        rows, depth = workload["M"], workload["D"]
        return reason or unsupported(workload, rows, depth, "x", "norm", "w", groups=2)

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        tiles = -(-workload["F"] // MMA_ROWS)
        return Stream(workload["M"], 2, tiles, workload["D"], schedule, not schedule.separate_norm)

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["F"]),)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        for tile in range(stream.tiles):
            starts, sizes = zip(*tile_slices(tile, stream.columns), strict=True)
            yield clipped((workload["M"], workload["F"]), starts, sizes)

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        activation = ACTIVATIONS[workload.option("activation", "silu")]

        def body(x_g: Any, *rest: Any, **scratch: Any) -> None:
            *norm, w_g, out_g = rest
            norm_g = norm[0] if norm else None

            def load(tile: Any, k: Any, destination: Any, barrier: Any) -> None:
                rows = pl.ds(tile * MMA_ROWS, MMA_ROWS)
                source = w_g.at[:, rows, pl.ds(k, schedule.tile_k)]
                plgpu.copy_gmem_to_smem(source, destination, barrier)

            def epilogue(tile: Any, sums: list[jax.Array]) -> None:
                gate, up = sums
                rows, columns = (pl.ds(*s) for s in tile_slices(tile, stream.columns))
                product = activation(gate) * up
                store_tiles([product], scratch["out_s"], [out_g.at[rows, columns]])

            stream.run(x_g, load, epilogue, scratch, norm_g, workload.option("eps"))

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["F"]), jnp.bfloat16),
            scratch_types=stream.scratch() | {"out_s": staging(1, stream.columns, jnp.bfloat16)},
            kernel_name="norm_gate_up_stream",
            **stream.launch(),
        )
        return with_norm(kernel, schedule, workload.option("eps"))


@dataclasses.dataclass(frozen=True)
class GemvGateUp(GemvKernel):
    def supports(self, workload: Workload) -> str | None:
        return _unsupported_activation(workload) or super().supports(workload)

    def gemv(self, workload: Workload, schedule: GemvSchedule) -> Gemv:
        return Gemv(workload["M"], 2, workload["F"], workload["D"], schedule, True)

    def outputs(self, workload: Workload, schedule: GemvSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["F"]),)

    def build(self, workload: Workload, schedule: GemvSchedule) -> Callable[..., Any]:
        gemv = self.gemv(workload, schedule)
        activation = ACTIVATIONS[workload.option("activation", "silu")]

        def body(x_g: Any, norm_g: Any, w_g: Any, out_g: Any) -> None:
            first = gemv.first_output(jax.lax.axis_index("block"))
            sums, _ = gemv.run(
                x_g, lambda group, row: w_g.at[group, first + row], norm_g, workload.option("eps")
            )
            for m, (gates, ups) in enumerate(sums):
                for row, (gate, up) in enumerate(zip(gates, ups, strict=True)):
                    out_g[m, first + row] = (activation(gate) * up).astype(out_g.dtype)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["F"]), jnp.bfloat16),
            kernel_name="norm_gate_up_gemv",
            **gemv.launch(),
        )


STREAM = StreamGateUp("mosaic_gpu.norm_gate_up.stream", NORM_GATE_UP)
GEMV = GemvGateUp("mosaic_gpu.norm_gate_up.gemv", NORM_GATE_UP)
