"""Embedding lookup: the rows of a step are copied from the table at the same time.

Rows of 16 bits lie in HBM in tiles of eight, and a copy takes whole tiles: of each the wanted row
is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_base import (
    RESERVED_BYTES,
    SUBLANES,
    bf16,
    f32,
    in_hbm,
    not_bfloat16,
    pallas_call,
    row_blocks,
    vmem_bytes,
)
from pallas_kernels.tpu_rows import TpuRowKernel, TpuRowSchedule, row_start
from polyjax.core.op import Workload
from polyjax.core.ops import EMBED


@dataclasses.dataclass(frozen=True)
class RowEmbed(TpuRowKernel):
    def supports(self, workload: Workload) -> str | None:
        if workload["V"] % SUBLANES:
            return f"a table of {workload['V']} rows is no multiple of {SUBLANES}"
        return not_bfloat16(workload, "table")

    def shared_memory_bytes(self, workload: Workload, schedule: TpuRowSchedule) -> int:
        rows, width = self.block(workload, schedule), workload["D"]
        tiles = vmem_bytes(rows, SUBLANES, width, dtype=bf16)
        kept = vmem_bytes(rows, width, dtype=f32) + 2 * vmem_bytes(rows, width, dtype=bf16)
        return tiles + 2 * kept + 2 * vmem_bytes(SUBLANES, width, dtype=f32) + RESERVED_BYTES

    def build(self, workload: Workload, schedule: TpuRowSchedule) -> Callable[..., Any]:
        count, width, last = workload["M"], workload["D"], workload["V"] - 1
        rows = self.block(workload, schedule)
        padded = row_blocks(count, rows) * rows

        def body(
            tokens_ref: Any, table_ref: Any, out_ref: Any, tiles: Any, kept: Any, ready: Any
        ) -> None:
            first = pl.program_id(0) * rows

            def token(row: Any) -> Any:
                return jnp.clip(tokens_ref[first + row], 0, last)

            def copy(row: Any) -> Any:
                start = pl.multiple_of(jax.lax.div(token(row), SUBLANES) * SUBLANES, SUBLANES)
                source = table_ref.at[pl.ds(start, SUBLANES), :]
                return pltpu.make_async_copy(source, tiles.at[row], ready.at[row])

            def keep(row: Any, _: None) -> None:
                copy(row).wait()
                wide = tiles[row].astype(f32)
                here = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 0)
                wanted = jnp.where(here == jax.lax.rem(token(row), SUBLANES), wide, -jnp.inf)
                kept[pl.ds(row, 1), :] = jnp.max(wanted, axis=0, keepdims=True)

            jax.lax.fori_loop(0, rows, lambda row, _: copy(row).start(), None)
            jax.lax.fori_loop(0, rows, keep, None)
            out_ref[...] = kept[...].astype(bf16)

        call = pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=self.grid(workload, schedule),
                in_specs=[in_hbm()],
                out_specs=pl.BlockSpec((rows, width), row_start),
                scratch_shapes=[
                    pltpu.VMEM((rows, SUBLANES, width), bf16),
                    pltpu.VMEM((rows, width), f32),
                    pltpu.SemaphoreType.DMA((rows,)),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct((count, width), bf16),
            compiler_params=self.params(workload, schedule, self.semantics(schedule)),
            name="embed",
        )

        def embed(table: Any, tokens: Any) -> jax.Array:
            return call(jnp.pad(tokens, (0, padded - count)), table)

        return embed


KERNEL = RowEmbed("mosaic_tpu.embed.row", EMBED)
