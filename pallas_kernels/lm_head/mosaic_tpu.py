"""Final RMSNorm and vocabulary projection to float32 logits as a weight stream through VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tpu_base import f32, vmem_bytes
from pallas_kernels.tpu_stream import (
    Epilogue,
    Position,
    Stream,
    TpuStreamKernel,
    TpuStreamSchedule,
    unsupported,
)
from polyjax.core.op import Workload
from polyjax.core.ops import LM_HEAD


def capped(logits: jax.Array, soft_cap: float) -> jax.Array:
    """The logits under a soft cap, if there is one."""
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


@dataclasses.dataclass(frozen=True)
class StreamHead(TpuStreamKernel):
    def supports(self, workload: Workload) -> str | None:
        return unsupported(workload, workload["D"], "x", "norm", "w")

    def stream(self, workload: Workload, schedule: TpuStreamSchedule) -> Stream:
        return Stream(workload["M"], 1, workload["V"], workload["D"], schedule, normalised=True)

    def extra_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        stream = self.stream(workload, schedule)
        return 3 * vmem_bytes(stream.tile_m, stream.tile_n, dtype=f32)

    def build(self, workload: Workload, schedule: TpuStreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        soft_cap = workload.option("soft_cap", 0.0)

        def body(_: Sequence[Any], outputs: Sequence[Any], __: Sequence[Any]) -> Epilogue:
            def epilogue(_: Position, sums: list[jax.Array]) -> None:
                outputs[0][...] = capped(sums[0], soft_cap)

            return epilogue

        call = stream.call(
            body,
            self.stream_params(workload, schedule),
            "lm_head",
            [],
            [stream.tile_spec()],
            [jax.ShapeDtypeStruct((stream.rows, stream.outputs), f32)],
            eps=workload.option("eps"),
        )
        return lambda x, norm, w: call(x, norm[None], w[None])[0]


STREAM = StreamHead("mosaic_tpu.lm_head.stream", LM_HEAD)
