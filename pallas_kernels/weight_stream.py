"""Skinny matrix products that stream weights through shared memory into swap-AB wgmma.

Decode multiplies few activation rows (M) with large weights, so the weights are the 64-row A
operand of wgmma and the activations its N operand (M padded to 8). Blocks are persistent: each
takes every `blocks`-th tile of weight rows, and its ring of weight chunks runs ahead across tiles.
With `split_k` > 1 the blocks of one cluster share a tile, each with its part of K; partial sums
travel through distributed shared memory to the first block of the cluster, which adds them in fixed
order.

Activations are either resident (loaded once per block) or streamed beside the weights; RMSNorm
multiplies them by its weight in shared memory and scales the sums by 1/rms. `Stream.run` is the
skeleton; an op gives it `load` (which weight rows belong to a tile) and `epilogue` (what becomes of
the sums).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import (
    BARRIER_BYTES,
    MMA_ROWS,
    REGISTERS_PER_THREAD,
    SWIZZLE_BYTES,
    WARPGROUP_THREADS,
    f32,
    round_up,
    shared_array_bytes,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Schedule

SWIZZLED = (
    plgpu.TilingTransform((8, 64)),
    plgpu.SwizzleTransform(SWIZZLE_BYTES),
)  # 16-bit elements
SWIZZLED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(SWIZZLE_BYTES))
ACCUMULATOR = plgpu.Layout.WGMMA
PER_ROW = ACCUMULATOR.reduce(1)  # one value per weight row
PER_COLUMN = ACCUMULATOR.reduce(0)  # one value per activation row


@dataclasses.dataclass(frozen=True)
class StreamSchedule(Schedule):
    """Knobs of a weight stream.

    `tile_k` weight columns per pipeline step, `stages` steps in flight, `split_k` blocks that share
    a tile, `blocks` tiles worked on at once (clusters if split), `resident` keeps the activations
    in shared memory, `reduction` "cluster" or its plain path "serial" (one block adds the same
    partial sums in the same order), `dependent_launch` starts streaming before the previous kernel
    ends, `tile_rows` weight rows a tile where the op leaves a choice, `separate_norm` lets XLA
    normalise the activations beforehand.

    With `dependent_launch` weights are read before the previous kernel has ended: they must be
    arguments of the program, never the result of another op in it.
    """

    tile_k: int = 128
    stages: int = 6
    split_k: int = 1
    blocks: int = 132
    resident: bool = True
    reduction: str = "cluster"
    dependent_launch: bool = False
    tile_rows: int = MMA_ROWS
    separate_norm: bool = False


@dataclasses.dataclass(frozen=True)
class Stream:
    """One product: `tiles` x [groups, 64, depth] weights with [rows, depth] activations."""

    rows: int
    groups: int
    tiles: int
    depth: int
    schedule: StreamSchedule
    normalised: bool
    weight_copies: int = 1  # TMA copies that fetch one step's weights

    @property
    def columns(self) -> int:
        """Activation rows padded to the granularity of wgmma's N."""
        return round_up(self.rows, 8)

    @property
    def cluster(self) -> int:
        return self.schedule.split_k if self.schedule.reduction == "cluster" else 1

    @property
    def splits_per_block(self) -> int:
        return self.schedule.split_k // self.cluster

    @property
    def steps(self) -> int:
        """Pipeline steps of one split of one tile."""
        return self.depth // self.schedule.split_k // self.schedule.tile_k

    @property
    def block_steps(self) -> int:
        """Pipeline steps of one tile in one block."""
        return self.steps * self.splits_per_block

    @property
    def part_slots(self) -> int:
        """Partial-sum buffers: two where a cluster works on more than one tile."""
        return 2 if self.tiles > self.schedule.blocks else 1

    def illegal(self, chip: ChipSpec) -> str | None:
        s = self.schedule
        if self.depth % (s.split_k * s.tile_k):
            return f"K={self.depth} is no multiple of split_k x tile_k = {s.split_k * s.tile_k}"
        if s.tile_k % 64 or not 64 <= s.tile_k <= 256:
            return f"tile_k={s.tile_k} is not 64, 128, 192 or 256 (swizzle atom, TMA box)"
        if s.reduction not in ("cluster", "serial"):
            return f"reduction={s.reduction!r} is neither 'cluster' nor 'serial'"
        if s.split_k > 8:
            return f"split_k={s.split_k} exceeds the portable cluster size 8"
        if self.columns > 256:
            return f"{self.rows} activation rows exceed wgmma's N limit of 256"
        if self.normalised and not s.resident and s.split_k > 1:
            return "streamed activations are normalised by one block: split_k must be 1"
        if not 1 <= s.blocks <= self.tiles:
            return f"blocks={s.blocks} is not between 1 and the {self.tiles} tiles"
        if s.stages < 2 or s.stages > self.block_steps * -(-self.tiles // s.blocks):
            return f"stages={s.stages} is not between 2 and the steps of a block"
        if self.registers > REGISTERS_PER_THREAD:
            return f"about {self.registers} registers a thread, the limit is {REGISTERS_PER_THREAD}"
        return None

    @property
    def registers(self) -> int:
        """Of a thread: accumulators, the scale of the norm and about 40 for addresses."""
        return (self.groups + self.normalised) * self.columns // 2 + 40

    def launch_shape(self) -> LaunchShape:
        """What the busiest block and all blocks together do, for cost models."""
        s, blocks = self.schedule, self.schedule.blocks * self.cluster
        tiles = -(-self.tiles // s.blocks)
        step_weights = 2 * self.groups * MMA_ROWS * s.tile_k
        step_rows = 2 * self.columns * s.tile_k
        loads = 1 if s.resident else tiles  # times a block reads its share of the activations
        activations = blocks * loads * self.block_steps * step_rows
        weights = self.tiles * self.block_steps * self.cluster * step_weights
        weighed = loads * self.block_steps * step_rows / 2 if self.normalised else 0.0
        stored = tiles * self.groups * MMA_ROWS * self.columns  # two operations each: cast, store
        return LaunchShape(
            blocks,
            WARPGROUP_THREADS,
            self.registers,
            float(weights + activations),
            min(s.stages, tiles * self.block_steps) * (step_weights + step_rows * (not s.resident)),
            cluster=self.cluster,
            steps=tiles * self.block_steps,
            tiles=tiles,
            syncs=tiles if self.cluster > 1 else 0,
            vector_ops=8.0 * weighed + 2.0 * stored,  # `weigh_chunk` takes about eight
            flops=2.0 * self.columns * weights / 2,
        )

    def shared_memory_bytes(self) -> int:
        s, part = self.schedule, shared_array_bytes
        x_slots = self.block_steps if s.resident else s.stages
        total = part(s.stages, self.groups, MMA_ROWS, s.tile_k, itemsize=2)
        total += part(x_slots, self.columns, s.tile_k, itemsize=2)
        total += self.groups * part(
            self.columns, MMA_ROWS, itemsize=4
        )  # output and residual staging
        if self.cluster > 1:
            total += part(
                self.part_slots, self.cluster - 1, self.groups, MMA_ROWS, self.columns, itemsize=4
            )
            total += (
                part(self.cluster - 1, MMA_ROWS, self.columns, itemsize=4) if self.normalised else 0
            )
        barriers = s.stages + 8
        return total + REDUCTION_SCRATCH_BYTES + barriers * BARRIER_BYTES + 2048

    def scratch(self) -> dict[str, Any]:
        s = self.schedule
        x_slots = self.block_steps if s.resident else s.stages
        types: dict[str, Any] = {
            "w_s": plgpu.SMEM(
                (s.stages, self.groups, MMA_ROWS, s.tile_k), jnp.bfloat16, transforms=SWIZZLED
            ),
            "x_s": plgpu.SMEM((x_slots, self.columns, s.tile_k), jnp.bfloat16, transforms=SWIZZLED),
            "ring": plgpu.Barrier(
                num_arrivals=self.weight_copies + (not s.resident), num_barriers=s.stages
            ),
            "x_loaded": plgpu.Barrier(num_arrivals=self.block_steps),
        }
        if self.cluster > 1:
            part = (self.groups, MMA_ROWS, self.columns)
            types["part_s"] = plgpu.SMEM((self.part_slots, self.cluster - 1, *part), f32)
            types["part_ready"] = plgpu.Barrier(
                num_arrivals=(self.cluster - 1) * self.groups, num_barriers=self.part_slots
            )
            if self.part_slots > 1:
                types["part_free"] = plgpu.ClusterBarrier(
                    collective_axes=("split",), num_barriers=self.part_slots
                )
                types["all_done"] = plgpu.ClusterBarrier(collective_axes=("split",))
            if self.normalised:
                types["square_s"] = plgpu.SMEM((self.cluster - 1, MMA_ROWS, self.columns), f32)
                types["square_ready"] = plgpu.Barrier(num_arrivals=self.cluster - 1)
        return types

    def launch(self) -> dict[str, Any]:
        """Keyword arguments of `plgpu.kernel` that follow from the schedule."""
        launch: dict[str, Any] = {"grid": (self.schedule.blocks,), "grid_names": ("block",)}
        if self.cluster > 1:
            launch |= {"cluster": (self.cluster,), "cluster_names": ("split",)}
        launch["compiler_params"] = plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES
        )
        return launch

    def run(
        self,
        x_g: Any,
        load: Callable[[Any, Any, Any, Any], None],
        epilogue: Callable[[Any, list[jax.Array]], None],
        scratch: dict[str, Any],
        norm_g: Any = None,
        eps: float = 0.0,
        before_tile: Callable[[Any], None] | None = None,
        after_wait: Callable[[], None] | None = None,
    ) -> None:
        """The kernel body.

        `load(tile, k, destination, barrier)` copies weights [groups, 64, tile_k] from column k;
        `epilogue(tile, sums)` gets `groups` arrays [64, columns] f32 in accumulator layout;
        `before_tile(tile)` may start loads that the epilogue needs. Both run in one block per tile.
        `after_wait()` runs once, when the previous kernel's results may be read.
        """
        body = _StreamBody(self, x_g, load, epilogue, scratch, norm_g, eps, before_tile, after_wait)
        body.run()


REDUCTION_SCRATCH_BYTES = 2048


@dataclasses.dataclass
class _StreamBody:
    """One block's program; methods in the order they run."""

    stream: Stream
    x_g: Any
    load: Callable[[Any, Any, Any, Any], None]
    epilogue: Callable[[Any, list[jax.Array]], None]
    scratch: dict[str, Any]
    norm_g: Any
    eps: float
    before_tile: Callable[[Any], None] | None
    after_wait: Callable[[], None] | None

    def run(self) -> None:
        s, schedule = self.stream, self.stream.schedule
        self.block = jax.lax.axis_index("block")
        self.split = jax.lax.axis_index("split") if s.cluster > 1 else jnp.int32(0)
        self.leads = self.split == 0
        my_tiles = (s.tiles - self.block + schedule.blocks - 1) // schedule.blocks
        self.total_steps = my_tiles * s.block_steps
        for step in range(schedule.stages):
            pl.when(step < self.total_steps)(lambda step=step: self.fetch_weights(jnp.int32(step)))
        if schedule.dependent_launch:  # weights do not depend on the kernel before, activations do
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        if self.after_wait is not None:
            self.after_wait()
        scale = None
        if schedule.resident:
            scale = self.load_activations()
        else:
            for step in range(schedule.stages):
                pl.when(step < self.total_steps)(
                    lambda step=step: self.fetch_activations(jnp.int32(step))
                )
        jax.lax.fori_loop(0, my_tiles, lambda i, _: self.tile(i, scale), None)
        plgpu.wait_smem_to_gmem(0)
        if "all_done" in self.scratch:
            # A block must not end while another may still arrive on a barrier in its shared memory.
            plgpu.barrier_arrive(self.scratch["all_done"])
            plgpu.barrier_wait(self.scratch["all_done"])

    def column(self, step: Any) -> Any:
        """First weight column of pipeline step `step` of a tile."""
        return (self.split * self.stream.block_steps + step) * self.stream.schedule.tile_k

    def fetch_weights(self, step: Any) -> None:
        s, schedule = self.stream, self.stream.schedule
        tile = self.block + (step // s.block_steps) * schedule.blocks
        slot = jax.lax.rem(step, schedule.stages)
        column = self.column(jax.lax.rem(step, s.block_steps))
        self.load(tile, column, self.scratch["w_s"].at[slot], self.scratch["ring"].at[slot])

    def fetch_activations(self, step: Any) -> None:
        schedule = self.stream.schedule
        slot = jax.lax.rem(step, schedule.stages)
        self.copy_activations(
            jax.lax.rem(step, self.stream.block_steps), slot, self.scratch["ring"].at[slot]
        )

    def copy_activations(self, step: Any, slot: Any, barrier: Any) -> None:
        s = self.stream
        source = self.x_g.at[pl.ds(0, s.columns), pl.ds(self.column(step), s.schedule.tile_k)]
        plgpu.copy_gmem_to_smem(source, self.scratch["x_s"].at[slot], barrier)

    def load_activations(self) -> jax.Array | None:
        """Fills x_s; with a norm, returns 1/rms [64, columns] (the leading block's is complete)."""
        s, x_loaded = self.stream, self.scratch["x_loaded"]
        jax.lax.fori_loop(
            0, s.block_steps, lambda j, _: self.copy_activations(j, j, x_loaded), None
        )
        plgpu.barrier_wait(x_loaded)
        if self.norm_g is None:
            return None
        squares = jax.lax.fori_loop(
            0, s.block_steps, lambda j, total: self.weigh_chunk(j, j, total), self.no_squares()
        )
        plgpu.commit_smem()
        squares = jax.lax.broadcast_in_dim(squares, (MMA_ROWS, s.columns), (1,))
        if s.cluster > 1:
            squares = self.gather_squares(squares)
        return jax.lax.rsqrt(squares / s.depth + self.eps)

    def no_squares(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((self.stream.columns,), f32), PER_COLUMN)

    def weigh_chunk(self, step: Any, slot: Any, squares: jax.Array) -> jax.Array:
        """Multiplies one chunk of x by the norm's weight in place; adds its squares per row."""
        s = self.stream
        chunk = self.scratch["x_s"].at[slot].T
        x = plgpu.load(chunk, layout=ACCUMULATOR, optimized=False).astype(f32)
        source = self.norm_g.at[pl.ds(self.column(step), s.schedule.tile_k)]
        weight = plgpu.load(source, layout=PER_ROW, optimized=False).astype(f32)
        weight = jax.lax.broadcast_in_dim(weight, (s.schedule.tile_k, s.columns), (0,))
        chunk[...] = (x * weight).astype(jnp.bfloat16)
        return squares + jnp.sum(x * x, axis=0)

    def gather_squares(self, squares: jax.Array) -> jax.Array:
        square_s, ready = self.scratch["square_s"], self.scratch["square_ready"]

        @pl.when(jnp.logical_not(self.leads))
        def _send() -> None:
            self.send(squares, square_s.at[self.split - 1], ready)

        @pl.when(self.leads)
        def _receive() -> None:
            plgpu.barrier_wait(ready)

        # The other blocks add what lies in their buffer; only the leading block uses the result.
        for i in range(self.stream.cluster - 1):
            squares = squares + plgpu.load(square_s.at[i], layout=ACCUMULATOR, optimized=False)
        return squares

    def send(self, value: jax.Array, destination: Any, barrier: Any) -> None:
        plgpu.async_store_smem(
            value,
            destination,
            barrier,
            cluster_idx=jnp.int32(0),
            cluster_dim="split",
            optimized=False,
        )

    def tile(self, i: Any, scale: jax.Array | None) -> None:
        s = self.stream
        tile = self.block + i * s.schedule.blocks
        if self.before_tile is not None:
            pl.when(self.leads)(lambda: self.before_tile(tile))
        sums, squares = self.products(i * s.block_steps)
        for split in range(1, s.splits_per_block):
            part, _ = self.products(i * s.block_steps + split * s.steps)
            sums = [a + b for a, b in zip(sums, part, strict=True)]
        if squares is not None:
            squares = jax.lax.broadcast_in_dim(squares, (MMA_ROWS, s.columns), (1,))
            scale = jax.lax.rsqrt(squares / s.depth + self.eps)
        if s.cluster == 1:
            self.finish(tile, sums, scale)
        else:
            self.reduce_in_cluster(i, tile, sums, scale)

    def products(self, first: Any) -> tuple[list[jax.Array], jax.Array | None]:
        """Sums over the steps of one split from the block's step `first`; squares of streamed x."""
        s, schedule, scratch = self.stream, self.stream.schedule, self.scratch
        weigh = self.norm_g is not None and not schedule.resident

        def scoped(*sums: Any) -> tuple[tuple[jax.Array, ...], Any]:
            def advance(k: Any, squares: Any) -> Any:
                step = first + k
                slot = jax.lax.rem(step, schedule.stages)
                plgpu.barrier_wait(scratch["ring"].at[slot])
                if weigh:
                    squares = self.weigh_chunk(jax.lax.rem(step, s.block_steps), slot, squares)
                    plgpu.commit_smem()
                x_slot = jax.lax.rem(step, s.block_steps) if schedule.resident else slot
                for group, total in enumerate(sums):
                    plgpu.wgmma(total, scratch["w_s"].at[slot, group], scratch["x_s"].at[x_slot].T)
                plgpu.wgmma_wait(0)

                @pl.when(step + schedule.stages < self.total_steps)
                def _refill() -> None:
                    self.fetch_weights(step + schedule.stages)
                    if not schedule.resident:
                        self.fetch_activations(step + schedule.stages)

                return squares

            start = self.no_squares() if weigh else None
            squares = jax.lax.fori_loop(0, s.steps, advance, start)
            return tuple(total[...] for total in sums), squares

        accumulator = plgpu.ACC((MMA_ROWS, s.columns), f32)
        sums, squares = pl.run_scoped(scoped, *[accumulator] * s.groups)
        return list(sums), squares

    def reduce_in_cluster(
        self, i: Any, tile: Any, sums: list[jax.Array], scale: jax.Array | None
    ) -> None:
        """Adds the blocks' partial sums in the order of their splits, in the first block."""
        s, scratch = self.stream, self.scratch
        slot = jax.lax.rem(i, s.part_slots)
        part_s, ready = scratch["part_s"].at[slot], scratch["part_ready"].at[slot]
        free = scratch["part_free"].at[slot] if s.part_slots > 1 else None

        @pl.when(jnp.logical_not(self.leads))
        def _send() -> None:
            if free is not None:
                pl.when(i >= s.part_slots)(lambda: plgpu.barrier_wait(free))
            for group, value in enumerate(sums):
                self.send(value, part_s.at[self.split - 1, group], ready)

        @pl.when(self.leads)
        def _add() -> None:
            plgpu.barrier_wait(ready)
            total = list(sums)
            for other in range(s.cluster - 1):
                for group in range(s.groups):
                    part = plgpu.load(part_s.at[other, group], layout=ACCUMULATOR, optimized=False)
                    total[group] = total[group] + part
            self.finish(tile, total, scale)

        if free is not None:
            plgpu.barrier_arrive(free)

    def finish(self, tile: Any, sums: list[jax.Array], scale: jax.Array | None) -> None:
        self.epilogue(tile, sums if scale is None else [total * scale for total in sums])


def staging(tiles: int, columns: int, dtype: Any) -> Any:
    """Scratch for [columns, 64] tiles of an output or residual, swizzled for the copy engine."""
    transforms = SWIZZLED_F32 if jnp.dtype(dtype).itemsize == 4 else SWIZZLED
    return plgpu.SMEM((tiles, columns, MMA_ROWS), dtype, transforms=transforms)


def store_tiles(values: list[jax.Array], staging_s: Any, destinations: list[Any]) -> None:
    """Stores [64, columns] sums transposed to destinations [columns, 64]; returns before they land.

    `staging_s` is [len(values), columns, 64].
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left the staging buffer
    for i, value in enumerate(values):
        store_transposed(value, staging_s.at[i])
    plgpu.commit_smem()
    for i, destination in enumerate(destinations):
        plgpu.copy_smem_to_gmem(staging_s.at[i], destination)


def store_transposed(value: jax.Array, staging_s: Any) -> None:
    """Stores [rows, columns] in accumulator layout into shared memory [columns, rows]."""
    value = value.astype(staging_s.dtype)
    if (
        jnp.dtype(staging_s.dtype).itemsize == 4
    ):  # only 16-bit elements are transposed by the store itself
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    staging_s.T[...] = value


def load_staged(staging_s: Any) -> jax.Array:
    """[columns, 64] staging as float32 [64, columns] in accumulator layout."""
    return plgpu.load(staging_s.T, layout=ACCUMULATOR, optimized=False).astype(f32)
