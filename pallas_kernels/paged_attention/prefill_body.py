"""The program of one prefill attention block: a warpgroup that brings data in, others that attend.

Named after what they do with a ring slot: `*_full` barriers say that its copies have arrived,
`*_free` that every consumer is done with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, f32
from pallas_kernels.paged_attention.mosaic_gpu import LOG2_E, MASKED
from pallas_kernels.paged_attention.prefill_tiles import Rows, Shape, Tile
from pallas_kernels.weight_stream import ACCUMULATOR, PER_ROW, SWIZZLED

# Above every masked score and below every real one: a row that has seen nothing weighs nothing.
LOWEST_PEAK = -1e20
TINY = 1e-30
CLEARED_COLUMNS = 64  # of a value block cleared at a time, to keep registers free
# Registers of a thread after reallocation (consumer, producer) by consuming warpgroups: 65536 an SM
REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32)}


def attention_kernel(shape: Shape, has_first: bool) -> Callable[..., Any]:
    s, dim = shape.schedule, shape.head_dim

    def body(*refs: Any, **scratch: Any) -> None:
        q_g, kv_g, pages_g, contexts_g, queries_g, *rest = refs
        first_g = rest[0] if has_first else None
        rows = Rows(shape, pages_g, contexts_g, queries_g, first_g)
        warpgroup = jax.lax.axis_index("warpgroup")
        wanted, left = REGISTERS[s.warpgroups]

        @pl.when(warpgroup == s.warpgroups)
        def _produce() -> None:
            if s.reallocate:
                plgpu.set_max_registers(left, action="decrease")
            _Producer(shape, rows, q_g, kv_g, scratch).run()

        @pl.when(warpgroup < s.warpgroups)
        def _consume() -> None:
            if s.reallocate:
                plgpu.set_max_registers(wanted, action="increase")
            _Consumer(shape, rows, warpgroup, rest[-1], scratch).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (shape.batch, shape.padded_tokens, shape.heads, dim), jnp.bfloat16
        ),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=s.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_prefill_attention",
    )


def _scratch(shape: Shape) -> dict[str, Any]:
    s, dim = shape.schedule, shape.head_dim

    def swizzled(*size: int) -> Any:
        return plgpu.SMEM(size, jnp.bfloat16, transforms=SWIZZLED)

    def consumed(number: int, by: int) -> Any:
        return plgpu.Barrier(num_arrivals=by, num_barriers=number)

    types = {
        "q_s": swizzled(s.warpgroups, MMA_ROWS, dim),
        "k_s": swizzled(s.stages, s.block, dim),
        "v_s": swizzled(s.stages, s.block, dim),
        "q_full": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=s.warpgroups),
        "k_full": plgpu.Barrier(num_arrivals=shape.pages_per_block, num_barriers=s.stages),
        "v_full": plgpu.Barrier(num_arrivals=shape.pages_per_block, num_barriers=s.stages),
        "q_free": consumed(s.warpgroups, 1),
        "k_free": consumed(s.stages, s.warpgroups),
        "v_free": consumed(s.stages, s.warpgroups),
        "cleared": consumed(1, 1),
    }
    if not s.reuse_queries:
        types["out_s"] = swizzled(s.warpgroups, MMA_ROWS, dim)
    if s.weights == "shared":
        types["p_s"] = swizzled(s.warpgroups, MMA_ROWS, s.block)
    if s.turns:
        types["turn"] = consumed(s.warpgroups, 1)
    return types


@dataclasses.dataclass
class _Producer:
    """The warpgroup that brings in queries, keys and values."""

    shape: Shape
    rows: Rows
    q_g: Any
    kv_g: Any
    scratch: dict[str, Any]

    def run(self) -> None:
        self.rows.each_tile(self.fetch, lambda live, block: None)
        for name in ("q_free", "k_free", "v_free"):  # every phase of a barrier is waited for
            for slot in range(self.scratch[name].shape[0]):
                plgpu.barrier_wait(self.scratch[name].at[slot])

    def fetch(self, tile: Tile, before: Any) -> None:
        for warpgroup in range(self.shape.schedule.warpgroups):
            self.fetch_queries(tile, warpgroup)
        self.fetch_pages("k", tile, jnp.int32(0), before)

        def advance(step: Any, _: None) -> None:
            """Keys are used one block ahead of values, and their slots are free earlier."""
            pl.when(step + 1 < tile.steps)(
                lambda: self.fetch_pages("k", tile, step + 1, before + step + 1)
            )
            self.fetch_pages("v", tile, step, before + step)

        jax.lax.fori_loop(0, tile.steps, advance, None)

    def fetch_queries(self, tile: Tile, warpgroup: int) -> None:
        shape = self.shape
        plgpu.barrier_wait(self.scratch["q_free"].at[warpgroup])
        for copy in range(shape.copies):
            head, offset = shape.place(warpgroup, copy)
            # Rows past the last token are computed and thrown away: any rows will do.
            token = jnp.minimum(tile.token + offset, shape.padded_tokens - 8)
            source = self.q_g.at[
                tile.row,
                pl.ds(token, shape.copy_rows),
                tile.group * shape.schedule.heads + head,
                :,
            ]
            rows = pl.ds(copy * shape.copy_rows, shape.copy_rows)
            destination = self.scratch["q_s"].at[warpgroup, rows, :]
            plgpu.copy_gmem_to_smem(source, destination, self.scratch["q_full"].at[warpgroup])

    def fetch_pages(self, name: str, tile: Tile, step: Any, number: Any) -> None:
        """Brings in keys or values of a tile's block `step`, the block's `number`-th of all."""
        shape, rows = self.shape, self.shape.page_rows
        pages, slot = self.page_numbers(tile, step), jax.lax.rem(number, shape.schedule.stages)
        kv_head = tile.group * shape.schedule.heads // (shape.heads // shape.kv_heads)
        part: Any = 0  # which part of the page, where a page is longer than a block
        if shape.page > rows:
            part = jax.lax.rem(step, shape.page // rows)
        plgpu.barrier_wait(self.scratch[f"{name}_free"].at[slot])
        for i, page in enumerate(pages):
            index = (page * 2 + "kv".index(name)) * shape.kv_heads + kv_head
            source = self.kv_g.at[index, pl.ds(part * rows, rows), :]
            destination = self.scratch[f"{name}_s"].at[slot, pl.ds(i * rows, rows), :]
            plgpu.copy_gmem_to_smem(source, destination, self.scratch[f"{name}_full"].at[slot])

    def page_numbers(self, tile: Tile, step: Any) -> tuple[Any, ...]:
        """Pages of a block; past the last live page the last one again, whose copy is masked."""
        shape = self.shape
        first = (tile.origin + step * shape.schedule.block) // shape.page
        last = (tile.context - 1) // shape.page
        columns = (jnp.minimum(first + i, last) for i in range(shape.pages_per_block))
        return tuple(self.rows.pages_g[tile.row, column - tile.first_page] for column in columns)


@dataclasses.dataclass
class _Consumer:
    """A warpgroup that attends for 64 rows of a tile."""

    shape: Shape
    rows: Rows
    warpgroup: Any
    out_g: Any
    scratch: dict[str, Any]

    @property
    def queries(self) -> Any:
        return self.scratch["q_s"].at[self.warpgroup]

    @property
    def staging(self) -> Any:
        name = "q_s" if self.shape.schedule.reuse_queries else "out_s"
        return self.scratch[name].at[self.warpgroup]

    def run(self) -> None:
        s = self.shape.schedule
        plgpu.barrier_arrive(self.scratch["q_free"].at[self.warpgroup])
        for slot in range(s.stages):
            plgpu.barrier_arrive(self.scratch["k_free"].at[slot])
            plgpu.barrier_arrive(self.scratch["v_free"].at[slot])
        if s.turns:  # the first turn is the first warpgroup's
            pl.when(self.warpgroup == s.warpgroups - 1)(
                lambda: plgpu.barrier_arrive(self.scratch["turn"].at[0])
            )
        self.rows.each_tile(self.attend, self.write_zeros)
        if s.turns:
            pl.when(self.warpgroup == 0)(self.take_turn)
        plgpu.wait_smem_to_gmem(0)

    # One tile ------------------------------------------------------------------------------

    def attend(self, tile: Tile, before: Any) -> None:
        plgpu.barrier_wait(self.scratch["q_full"].at[self.warpgroup])
        carry = self.first_block(tile, before)
        one = jnp.int32(1)
        lead = jnp.clip(tile.seen_from, one, tile.steps)
        tail = jnp.clip(tile.seen_to, lead, tile.steps)
        parts = [(lead, tail, False), (tail, tile.steps, True)]
        if self.shape.window:
            parts.insert(0, (one, lead, True))
        for begin, end, masked in parts:
            carry = jax.lax.fori_loop(
                begin,
                end,
                lambda i, c, masked=masked: self.next_block(tile, before, i, c, masked),
                carry,
            )
        if not self.shape.schedule.reuse_queries:
            plgpu.barrier_arrive(self.scratch["q_free"].at[self.warpgroup])
        self.finish(tile, before, carry)

    def first_block(self, tile: Tile, before: Any) -> Any:
        slot = jax.lax.rem(before, self.shape.schedule.stages)
        plgpu.barrier_wait(self.scratch["k_full"].at[slot])

        def product(scores: Any) -> jax.Array:
            plgpu.wgmma(scores, self.queries, self.scratch["k_s"].at[slot].T)
            return scores[...]

        raw = pl.run_scoped(product, plgpu.ACC((MMA_ROWS, self.shape.schedule.block), f32))
        plgpu.barrier_arrive(self.scratch["k_free"].at[slot])
        peak = plgpu.layout_cast(jnp.full((MMA_ROWS,), LOWEST_PEAK, f32), PER_ROW)
        sums = plgpu.layout_cast(jnp.zeros((MMA_ROWS, 8), f32), ACCUMULATOR)
        out = plgpu.layout_cast(jnp.zeros((MMA_ROWS, self.shape.head_dim), f32), ACCUMULATOR)
        weights, peak, sums, _ = self.softmax(tile, raw, 0, peak, sums, True)
        plgpu.barrier_wait(self.scratch["v_full"].at[slot])
        return out, peak, sums, *self.keep(weights)

    def next_block(self, tile: Tile, before: Any, step: Any, carry: Any, masked: bool) -> Any:
        """Scores of block `step` and the weighted values of the one before."""
        s, scratch = self.shape.schedule, self.scratch
        out, peak, sums, *weights = carry
        slot = jax.lax.rem(before + step, s.stages)
        last = jax.lax.rem(before + step - 1, s.stages)
        plgpu.barrier_wait(scratch["k_full"].at[slot])
        self.take_turn()

        def products(added: Any, scores: Any) -> Any:
            if s.accumulate:
                added[...] = out
            plgpu.wgmma(scores, self.queries, scratch["k_s"].at[slot].T)
            plgpu.wgmma(added, self.operand(weights), scratch["v_s"].at[last])
            if not s.ahead:
                plgpu.wgmma_wait(0)
            self.pass_turn()
            raw = plgpu.wgmma_accumulator_load(scores, wait_n=1 if s.ahead else 0)
            raw = jax.lax.optimization_barrier(raw)
            plgpu.barrier_arrive(scratch["k_free"].at[slot])
            state = self.softmax(tile, raw, step, peak, sums, masked)
            state = jax.lax.optimization_barrier(state)
            # A branch between softmax and product: ptxas would wait for the product first.
            plgpu.barrier_wait(scratch["v_full"].at[slot])
            total = added[...]
            # The last weights' registers are the product's until here: the next ones wait in
            # float32, or ptxas would have one instruction of the products run after the other.
            total, *_ = jax.lax.optimization_barrier((total, *weights))
            return (total if s.accumulate else out + total), *state

        accumulators = (
            plgpu.ACC((MMA_ROWS, self.shape.head_dim), f32),
            plgpu.ACC((MMA_ROWS, s.block), f32),
        )
        out, new, peak, sums, shrink = pl.run_scoped(products, *accumulators)
        plgpu.barrier_arrive(scratch["v_free"].at[last])
        out = out * jax.lax.broadcast_in_dim(shrink, out.shape, (0,))
        return out, peak, sums, *self.keep(new)

    def finish(self, tile: Tile, before: Any, carry: Any) -> None:
        """Weighted values of the last block; the rows, normalised, to their place."""
        out, _, sums, *weights = carry
        last = jax.lax.rem(before + tile.steps - 1, self.shape.schedule.stages)
        self.clear_dead_values(tile, last)

        def product(added: Any) -> jax.Array:
            if self.shape.schedule.accumulate:
                added[...] = out
            plgpu.wgmma(added, self.operand(weights), self.scratch["v_s"].at[last])
            return added[...] if self.shape.schedule.accumulate else out + added[...]

        out = pl.run_scoped(product, plgpu.ACC(out.shape, f32))
        plgpu.barrier_arrive(self.scratch["v_free"].at[last])
        self.store(tile, out, jnp.sum(sums, axis=1))

    # Parts of it ---------------------------------------------------------------------------

    def take_turn(self) -> None:
        if self.shape.schedule.turns:
            plgpu.barrier_wait(self.scratch["turn"].at[self.warpgroup])

    def pass_turn(self) -> None:
        s = self.shape.schedule
        if s.turns:
            following = jax.lax.rem(self.warpgroup + 1, s.warpgroups)
            plgpu.barrier_arrive(self.scratch["turn"].at[following])

    def keep(self, weights: jax.Array) -> tuple[jax.Array, ...]:
        """Weights for the next product, as carried: in registers, or none and in p_s."""
        weights = weights.astype(jnp.bfloat16)
        if self.shape.schedule.weights == "registers":
            return (weights,)
        self.scratch["p_s"].at[self.warpgroup][...] = weights
        plgpu.commit_smem()
        return ()

    def operand(self, weights: list[jax.Array]) -> Any:
        return weights[0] if weights else self.scratch["p_s"].at[self.warpgroup]

    def tokens(self, size: tuple[int, ...]) -> jax.Array:
        """Token of each row, counted from the tile's first; [64, size[1]]."""
        shape = self.shape
        row = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=ACCUMULATOR)
        if shape.tile_tokens < MMA_ROWS:
            return jax.lax.rem(row, shape.tile_tokens)
        return row + shape.place(self.warpgroup, 0)[1]

    def softmax(
        self, tile: Tile, raw: jax.Array, step: Any, peak: Any, sums: Any, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(weights, peak, sums, what older weights shrink by), all float32, in base 2.

        `sums` [64, 8] are of every eighth column: the lanes that share a row add up at the end.
        """
        shape, factor = self.shape, self.shape.scale * LOG2_E
        if shape.soft_cap:
            raw = jnp.tanh(raw * (shape.scale / shape.soft_cap))
            factor = shape.soft_cap * LOG2_E
        if masked:
            # Rows without a token see what their sequence owns: slots past it may hold NaN.
            position = jnp.minimum(tile.start + self.tokens(raw.shape), tile.context - 1)
            column = plgpu.broadcasted_iota(jnp.int32, raw.shape, 1, layout=ACCUMULATOR)
            column = column + (tile.origin + step * shape.schedule.block)
            seen = column <= position
            if shape.window:
                seen = jnp.logical_and(seen, column > position - shape.window)
            raw = jnp.where(seen, raw, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(raw, axis=1) * factor)
        weights = jnp.exp2(raw * factor - jax.lax.broadcast_in_dim(new_peak, raw.shape, (0,)))
        shrink = jnp.exp2(peak - new_peak)
        sums = sums * jax.lax.broadcast_in_dim(shrink, sums.shape, (0,))
        for column in range(0, raw.shape[1], 8):
            sums = sums + weights[:, column : column + 8]
        return weights, new_peak, sums, shrink

    def clear_dead_values(self, tile: Tile, slot: Any) -> None:
        """Zeroes values past the sequence: slots nobody owns may hold NaN, and 0 * NaN is NaN.

        The first warpgroup does it, the others wait.
        """
        shape, block = self.shape, self.shape.schedule.block
        begin = tile.origin + (tile.steps - 1) * block
        size = (MMA_ROWS, CLEARED_COLUMNS)

        def clear(rows: int, columns: int) -> None:
            part = self.scratch["v_s"].at[
                slot, pl.ds(rows, MMA_ROWS), pl.ds(columns, CLEARED_COLUMNS)
            ]
            position = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=ACCUMULATOR)
            owned = position + (begin + rows) < tile.context
            loaded = plgpu.load(part, layout=ACCUMULATOR).astype(f32)
            part[...] = jnp.where(owned, loaded, 0.0).astype(jnp.bfloat16)

        @pl.when(begin + block > tile.context)
        def _() -> None:
            @pl.when(self.warpgroup == 0)
            def _clear() -> None:
                for rows in range(0, block, MMA_ROWS):
                    for columns in range(0, shape.head_dim, CLEARED_COLUMNS):
                        clear(rows, columns)
                plgpu.commit_smem()
                plgpu.barrier_arrive(self.scratch["cleared"].at[0])

            plgpu.barrier_wait(self.scratch["cleared"].at[0])

    def store(self, tile: Tile, out: jax.Array, total: jax.Array) -> None:
        out = out * jax.lax.broadcast_in_dim(1.0 / jnp.maximum(total, TINY), out.shape, (0,))
        live = self.tokens(out.shape) < tile.queries - tile.token
        out = jnp.where(live, out, 0.0).astype(jnp.bfloat16)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's output has left
        self.staging[...] = out
        plgpu.commit_smem()
        self.copy_out(tile.row, tile.group, tile.token)
        if self.shape.schedule.reuse_queries:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.scratch["q_free"].at[self.warpgroup])

    def copy_out(self, row: Any, group: Any, token: Any) -> None:
        """Copies the staged rows to their heads and tokens; what lies outside is dropped."""
        shape = self.shape
        for copy in range(shape.copies):
            head, offset = shape.place(self.warpgroup, copy)
            rows = pl.ds(copy * shape.copy_rows, shape.copy_rows)
            destination = self.out_g.at[
                row,
                pl.ds(token + offset, shape.copy_rows),
                group * shape.schedule.heads + head,
                :,
            ]

            def send(rows: Any = rows, destination: Any = destination) -> None:
                plgpu.copy_smem_to_gmem(self.staging.at[rows, :], destination)

            pl.when(token + offset < shape.padded_tokens)(send)

    def write_zeros(self, live: Any, block: Any) -> None:
        """Zeroes the tiles that hold no token: one staged tile of zeros serves them all."""
        shape, blocks = self.shape, self.shape.schedule.blocks
        dead = shape.items - live
        mine = (dead - block + blocks - 1) // blocks

        @pl.when(mine > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            zeros = jnp.zeros((MMA_ROWS, shape.head_dim), jnp.bfloat16)
            self.staging[...] = plgpu.layout_cast(zeros, ACCUMULATOR)
            plgpu.commit_smem()
            jax.lax.fori_loop(
                0,
                mine,
                lambda i, _: self.copy_out(*self.rows.dead_tile(block + i * blocks)),
                None,
            )
