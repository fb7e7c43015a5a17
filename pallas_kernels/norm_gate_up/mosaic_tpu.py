"""RMSNorm, gate and up projections and the gated activation as one weight stream through VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

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
from polyjax.core.ops import NORM_GATE_UP

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class StreamGateUp(TpuStreamKernel):
    def supports(self, workload: Workload) -> str | None:
        activation = workload.option("activation", "silu")
        if activation not in ACTIVATIONS:
            return f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}"
        return unsupported(workload, workload["D"], "x", "norm", "w")

    def stream(self, workload: Workload, schedule: TpuStreamSchedule) -> Stream:
        return Stream(workload["M"], 2, workload["F"], workload["D"], schedule, normalised=True)

    def extra_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        stream = self.stream(workload, schedule)
        tile = stream.tile_m, stream.tile_n
        return 2 * vmem_bytes(*tile, dtype=bf16) + 2 * vmem_bytes(*tile, dtype=f32)

    def build(self, workload: Workload, schedule: TpuStreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        activation = ACTIVATIONS[workload.option("activation", "silu")]

        def body(_: Sequence[Any], outputs: Sequence[Any], __: Sequence[Any]) -> Epilogue:
            def epilogue(_: Position, sums: list[jax.Array]) -> None:
                # Each product is rounded as a matmul of its own would be.
                gate, up = (total.astype(bf16).astype(f32) for total in sums)
                outputs[0][...] = (activation(gate) * up).astype(bf16)

            return epilogue

        call = stream.call(
            body,
            self.stream_params(workload, schedule),
            "norm_gate_up",
            [],
            [stream.tile_spec()],
            [jax.ShapeDtypeStruct((stream.rows, stream.outputs), bf16)],
            eps=workload.option("eps"),
        )
        return lambda x, norm, w: call(x, norm[None], w)[0]


STREAM = StreamGateUp("mosaic_tpu.norm_gate_up.stream", NORM_GATE_UP)
