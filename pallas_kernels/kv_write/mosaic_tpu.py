"""Writes new keys and values to their slots of the paged pool, in place.

Rows of 16 bits lie in HBM in tiles of eight slots, so a tile is read, changed and written back: of
all heads, keys and values at once. The rows of a step do this at the same time. Rows that share a
tile must not lose each other's: each merges all of the step's rows into its tile, and the first of
them writes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.base import clipped
from pallas_kernels.tpu_base import (
    RESERVED_BYTES,
    SUBLANES,
    bf16,
    f32,
    i32,
    in_hbm,
    not_bfloat16,
    pallas_call,
    sequential,
    vmem_bytes,
)
from pallas_kernels.tpu_rows import TpuRowKernel, TpuRowSchedule
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import KV_WRITE


def new_rows(step: Any, *_: Any) -> tuple[int, int, Any, int]:
    """A step's block of the new rows [2,K,M,H]: the write map and the block's index."""
    return 0, 0, step, 0


def unsupported_pool(workload: Workload) -> str | None:
    """Why tiles of the pool kv [P,2,K,Z,H] cannot be copied, or None."""
    if workload["Z"] % SUBLANES:
        return f"pages of {workload['Z']} slots are no multiple of {SUBLANES}"
    return not_bfloat16(workload, "kv", "k", "v")


@dataclasses.dataclass(frozen=True)
class RowWriter:
    """Writes float32 rows [2,K,M,H] to slots [M] of a pool; what two kernels share."""

    rows: int
    heads: int
    head_dim: int
    page_size: int
    block: int

    @property
    def grid(self) -> tuple[int]:
        return (-(-self.rows // self.block),)

    def vmem_bytes(self) -> int:
        tiles = vmem_bytes(self.block, 2, self.heads, SUBLANES, self.head_dim, dtype=bf16)
        new = 2 * vmem_bytes(2, self.heads, self.block, self.head_dim, dtype=f32)
        wide = 3 * vmem_bytes(2, self.heads, SUBLANES, self.head_dim, dtype=f32)
        return tiles + new + wide + RESERVED_BYTES

    def call(self, params: pltpu.CompilerParams) -> Callable[..., Any]:
        """Returns f(slots, new rows, pool) -> the pool, in place where it is donated."""
        tile = 2, self.heads, SUBLANES, self.head_dim
        block = 2, self.heads, self.block, self.head_dim

        def write(slots: Any, new: Any, pool: Any) -> jax.Array:
            return pallas_call(
                self._body,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=self.grid,
                    in_specs=[pl.BlockSpec(block, new_rows), in_hbm()],
                    out_specs=in_hbm(),
                    scratch_shapes=[
                        pltpu.VMEM((self.block, *tile), bf16),
                        pltpu.SemaphoreType.DMA((self.block,)),
                        pltpu.SemaphoreType.DMA((self.block,)),
                    ],
                ),
                out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
                input_output_aliases={2: 0},
                compiler_params=params,
                name="kv_write",
            )(slots, new, pool)

        return write

    def _body(
        self, slots: Any, new: Any, _: Any, pool: Any, tiles: Any, read: Any, written: Any
    ) -> None:
        first = pl.program_id(0) * self.block
        live = jnp.minimum(self.block, self.rows - first)

        def tile_of(row: Any) -> Any:
            """Number of a row's tile among all tiles of the pool."""
            return jax.lax.div(slots[first + row], SUBLANES)

        def place(row: Any) -> Any:
            per_page = self.page_size // SUBLANES
            tile = tile_of(row)
            start = pl.multiple_of(jax.lax.rem(tile, per_page) * SUBLANES, SUBLANES)
            return pool.at[jax.lax.div(tile, per_page), :, :, pl.ds(start, SUBLANES), :]

        def fetch(row: Any) -> Any:
            return pltpu.make_async_copy(place(row), tiles.at[row], read.at[row])

        def store(row: Any) -> Any:
            return pltpu.make_async_copy(tiles.at[row], place(row), written.at[row])

        def merge(row: Any, _: None) -> None:
            fetch(row).wait()
            slot_in_tile = jax.lax.broadcasted_iota(i32, tiles.shape[1:], 2)

            def put(other: Any, __: None) -> None:
                @pl.when(tile_of(other) == tile_of(row))
                def _put() -> None:
                    here = slot_in_tile == jax.lax.rem(slots[first + other], SUBLANES)
                    value = jnp.where(here, new[:, :, pl.ds(other, 1), :], tiles[row].astype(f32))
                    tiles[row] = value.astype(bf16)

            jax.lax.fori_loop(0, live, put, None)

        def leads(row: Any) -> Any:
            """Whether no earlier row of the step has the same tile."""
            same = lambda other, found: found | (tile_of(other) == tile_of(row))  # noqa: E731
            return jnp.logical_not(jax.lax.fori_loop(0, row, same, jnp.bool_(False)))

        def store_if_first(row: Any, _: None) -> None:
            pl.when(leads(row))(lambda: store(row).start())

        def wait_if_first(row: Any, _: None) -> None:
            pl.when(leads(row))(lambda: store(row).wait())

        jax.lax.fori_loop(0, live, lambda row, _: fetch(row).start(), None)
        jax.lax.fori_loop(0, live, merge, None)
        jax.lax.fori_loop(0, live, store_if_first, None)
        jax.lax.fori_loop(0, live, wait_if_first, None)


@dataclasses.dataclass(frozen=True)
class SlotWrite(TpuRowKernel):
    may_run_parallel: ClassVar[bool] = False  # rows of different steps may share a tile

    def supports(self, workload: Workload) -> str | None:
        return unsupported_pool(workload)

    def illegal(self, workload: Workload, schedule: TpuRowSchedule, chip: ChipSpec) -> str | None:
        if self.block(workload, schedule) > 64:
            return "more than 64 rows a step compare their tiles pair by pair"
        return super().illegal(workload, schedule, chip)

    def writer(self, workload: Workload, schedule: TpuRowSchedule) -> RowWriter:
        rows = self.block(workload, schedule)
        return RowWriter(workload["M"], workload["K"], workload["H"], workload["Z"], rows)

    def shared_memory_bytes(self, workload: Workload, schedule: TpuRowSchedule) -> int:
        return self.writer(workload, schedule).vmem_bytes()

    def outputs(self, workload: Workload, schedule: TpuRowSchedule) -> tuple[tuple[int, ...], ...]:
        """The new rows [2,K,M,H] that go to the pool's slots."""
        return ((2, workload["K"], workload["M"], workload["H"]),)

    def writes(self, workload: Workload, schedule: TpuRowSchedule) -> Iterator[Writes]:
        (shape,), rows = self.outputs(workload, schedule), self.block(workload, schedule)
        for step in range(self.grid(workload, schedule)[0]):
            side, head, block, dim = new_rows(step)
            start = side, head, block * rows, dim
            yield clipped(shape, start, (shape[0], shape[1], rows, shape[3]))

    def build(self, workload: Workload, schedule: TpuRowSchedule) -> Callable[..., Any]:
        params = self.params(workload, schedule, sequential(1))
        write = self.writer(workload, schedule).call(params)

        def kv_write(kv: Any, k: Any, v: Any, slots: Any) -> jax.Array:
            new = jnp.stack([k, v]).transpose(0, 2, 1, 3).astype(f32)
            return write(slots, new, kv)

        return kv_write


KERNEL = SlotWrite("mosaic_tpu.kv_write.slot", KV_WRITE)
