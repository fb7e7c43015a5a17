"""Matmul x [M,K] @ w[N,K].T (+ bias) (+ residual) as a weight stream through VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tpu_base import bf16, f32, vmem_bytes
from pallas_kernels.tpu_stream import (
    Epilogue,
    Position,
    Stream,
    TpuStreamKernel,
    TpuStreamSchedule,
    unsupported,
)
from polyjax.core.op import Workload
from polyjax.core.ops import MATMUL


def out_dtype(workload: Workload) -> jnp.dtype:
    return jnp.dtype(workload.option("out_dtype") or workload.dtype("x"))


@dataclasses.dataclass(frozen=True)
class StreamMatmul(TpuStreamKernel):
    def supports(self, workload: Workload) -> str | None:
        if out_dtype(workload) not in (bf16, f32):
            return f"results of {out_dtype(workload)} are neither bfloat16 nor float32"
        return unsupported(workload, workload["K"], "x", "w", "bias", "residual")

    def stream(self, workload: Workload, schedule: TpuStreamSchedule) -> Stream:
        return Stream(workload["M"], 1, workload["N"], workload["K"], schedule)

    def extra_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        stream = self.stream(workload, schedule)
        tile = stream.tile_m, stream.tile_n
        total = 2 * vmem_bytes(*tile, dtype=out_dtype(workload)) + vmem_bytes(*tile, dtype=f32)
        if workload.has("bias"):
            total += 2 * vmem_bytes(1, stream.tile_n, dtype=bf16)
        return total + 2 * vmem_bytes(*tile, dtype=bf16) * workload.has("residual")

    def build(self, workload: Workload, schedule: TpuStreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        has_bias, has_residual = workload.has("bias"), workload.has("residual")
        extra = [stream.tile_spec(rows=1)] * has_bias + [stream.tile_spec()] * has_residual

        def body(extras: Sequence[Any], outputs: Sequence[Any], _: Sequence[Any]) -> Epilogue:
            def epilogue(_: Position, sums: list[jax.Array]) -> None:
                (total,) = sums
                for added in extras:  # a bias [1,N] is spread over the rows
                    total = total + added[...].astype(f32)
                outputs[0][...] = total.astype(outputs[0].dtype)

            return epilogue

        call = stream.call(
            body,
            self.stream_params(workload, schedule),
            "matmul",
            extra,
            [stream.tile_spec()],
            [jax.ShapeDtypeStruct((stream.rows, stream.outputs), out_dtype(workload))],
        )

        def matmul(x: Any, w: Any, bias: Any = None, residual: Any = None) -> jax.Array:
            added = [] if bias is None else [bias[None]]
            added += [] if residual is None else [residual]
            return call(x, w[None], *added)[0]

        return matmul


STREAM = StreamMatmul("mosaic_tpu.matmul.stream", MATMUL)
