"""Embedding lookup, one token a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.row_kernel import RowKernel, RowSchedule, strided, unsupported_row
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import EMBED


def row_start(block: Any) -> tuple[Any, int]:
    """First element of a block's output: the write map and the body's store."""
    return block, 0


@dataclasses.dataclass(frozen=True)
class RowEmbed(RowKernel):
    def supports(self, workload: Workload) -> str | None:
        return unsupported_row(workload, workload["D"], "table")

    def outputs(self, workload: Workload, schedule: RowSchedule) -> tuple[tuple[int, ...], ...]:
        return ((workload["M"], workload["D"]),)

    def writes(self, workload: Workload, schedule: RowSchedule) -> Iterator[Writes]:
        for block in range(workload["M"]):
            yield Writes(0, row_start(block), (1, workload["D"]))

    def build(self, workload: Workload, schedule: RowSchedule) -> Callable[..., Any]:
        layout, vocabulary = strided(workload["D"]), workload["V"]

        def body(table_g: Any, tokens_g: Any, out_g: Any) -> None:
            schedule.wait()
            row, _ = row_start(jax.lax.axis_index("block"))
            token = jnp.clip(tokens_g[row], 0, vocabulary - 1)
            out_g.at[row][...] = plgpu.load(table_g.at[token], layout=layout)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((workload["M"], workload["D"]), jnp.bfloat16),
            grid=(workload["M"],),
            grid_names=("block",),
            kernel_name="embed",
        )


KERNEL = RowEmbed("mosaic_gpu.embed.row", EMBED)
