"""Prefill attention's schedule, its tiles, and the order in which blocks take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.base import MMA_ROWS, round_up
from polyjax.core.op import Schedule


@dataclasses.dataclass(frozen=True)
class PrefillSchedule(Schedule):
    """Knobs of the tile, the ring and the overlap.

    `warpgroups` of 64 rows share a tile of `heads` query heads; `block` tokens of context a step,
    `stages` steps in flight; `blocks` persistent blocks; tiles of `side_by_side` head groups of a
    sequence run next to each other (all of them, or few where their pages fill the L2 cache).
    `ahead` asks for the next scores before the softmax of the last, `turns` makes warpgroups ask
    one after the other, `reallocate` gives the producer's registers to the consumers,
    `reuse_queries` stages the output where the queries were. `weights` go into the second product
    from "registers" or through "shared" memory; `accumulate` adds to the output inside the product
    (both have plain paths: interpret mode has no other).
    """

    warpgroups: int = 2
    heads: int = 1
    block: int = 128
    stages: int = 2
    blocks: int = 132
    side_by_side: int = 1
    ahead: bool = True
    turns: bool = True
    reallocate: bool = True
    reuse_queries: bool = False
    weights: str = "registers"
    accumulate: bool = True


@dataclasses.dataclass(frozen=True)
class Shape:
    """The numbers of one workload and schedule that the body needs."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    scale: float
    window: int
    soft_cap: float
    schedule: PrefillSchedule

    @property
    def tile_tokens(self) -> int:
        return self.schedule.warpgroups * MMA_ROWS // self.schedule.heads

    @property
    def copy_rows(self) -> int:
        """Rows of one head that a warpgroup holds: one copy brings them."""
        return min(self.tile_tokens, MMA_ROWS)

    @property
    def padded_tokens(self) -> int:
        """New tokens a sequence as the copy engine sees them: tiles of 8 rows, one box at least."""
        return max(round_up(self.tokens, 8), self.copy_rows)

    @property
    def tiles(self) -> int:
        return -(-self.padded_tokens // self.tile_tokens)

    @property
    def head_groups(self) -> int:
        return self.heads // self.schedule.heads

    @property
    def items(self) -> int:
        return self.batch * self.tiles * self.head_groups

    @property
    def copies(self) -> int:
        """Copies that bring one warpgroup's queries."""
        return MMA_ROWS // self.copy_rows

    @property
    def pages_per_block(self) -> int:
        return max(1, self.schedule.block // self.page)

    @property
    def page_rows(self) -> int:
        """Tokens of one page that one block takes."""
        return min(self.page, self.schedule.block)

    def place(self, warpgroup: Any, copy: int) -> tuple[Any, Any]:
        """(head, token) within the tile of a warpgroup's copy: rows are head after head."""
        row = warpgroup * MMA_ROWS + copy * self.copy_rows
        if isinstance(row, int):
            return divmod(row, self.tile_tokens)
        return jax.lax.div(row, self.tile_tokens), jax.lax.rem(row, self.tile_tokens)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of a sequence with tokens: what of the context it reads, in blocks from `origin`.

    `start` is the position of the tile's first token; blocks in [seen_from, seen_to) are seen by
    every token of the tile, the others need a mask.
    """

    row: Any
    group: Any
    token: Any
    context: Any
    queries: Any
    first_page: Any
    start: Any
    origin: Any
    steps: Any
    seen_from: Any
    seen_to: Any


@dataclasses.dataclass
class Rows:
    """The sequences of a call: which tiles they consist of, in the order blocks take them."""

    shape: Shape
    pages_g: Any
    contexts_g: Any
    queries_g: Any
    first_g: Any

    def live_tiles(self, row: Any) -> Any:
        """Tiles of a sequence that hold a token, of all its head groups."""
        shape = self.shape
        tiles = (self.queries_g[row] + shape.tile_tokens - 1) // shape.tile_tokens
        return tiles * shape.head_groups

    def each_tile(self, visit: Callable[[Tile, Any], None], zero: Callable[..., None]) -> None:
        """Calls visit(tile, steps before it) for this block's live tiles, zero for the others."""
        shape, blocks = self.shape, self.shape.schedule.blocks
        block = jax.lax.axis_index("block")
        count = lambda row, total: total + self.live_tiles(row)  # noqa: E731
        live = jax.lax.fori_loop(0, shape.batch, count, jnp.int32(0))
        mine = (live - block + blocks - 1) // blocks

        def advance(turn: Any, carry: Any) -> Any:
            item = block + turn * blocks
            steps, *place = carry
            row, before, tiles = self._seek(item, *place)
            tile = self._tile(row, item - before, tiles)
            visit(tile, steps)
            return steps + tile.steps, row, before, tiles

        nothing = jnp.int32(0)
        jax.lax.fori_loop(0, mine, advance, (nothing, nothing, nothing, self.live_tiles(nothing)))
        zero(live, block)

    def _seek(self, item: Any, row: Any, before: Any, tiles: Any) -> tuple[Any, Any, Any]:
        """(row, items of the rows before it, its items) of the row that an item belongs to."""
        if self.shape.batch == 1:
            return row, before, tiles

        def onwards(place: Any) -> Any:
            row, before, tiles = place
            return row + 1, before + tiles, self.live_tiles(row + 1)

        return jax.lax.while_loop(
            lambda place: item >= place[1] + place[2], onwards, (row, before, tiles)
        )

    def _tile(self, row: Any, number: Any, tiles: Any) -> Tile:
        """The number-th tile of a row: by sections of head groups, the last tokens first."""
        shape, s = self.shape, self.shape.schedule
        section_tiles = tiles // (shape.head_groups // s.side_by_side)
        section, inside = jax.lax.div(number, section_tiles), jax.lax.rem(number, section_tiles)
        last = section_tiles // s.side_by_side - 1
        token = (last - inside // s.side_by_side) * shape.tile_tokens
        group = section * s.side_by_side + jax.lax.rem(inside, s.side_by_side)
        context, queries = self.contexts_g[row], self.queries_g[row]
        first_page = self.first_g[row] if self.first_g is not None else jnp.int32(0)
        start = context - queries + token
        end = jnp.minimum(start + shape.tile_tokens, context)
        origin, seen_from = first_page * shape.page, jnp.int32(0)
        if shape.window:
            visible = jnp.maximum(start - shape.window + 1, 0)
            origin = jnp.maximum(visible // shape.page * shape.page, origin)
            unseen = jnp.maximum(start + shape.tile_tokens - shape.window - origin, 0)
            seen_from = (unseen + s.block - 1) // s.block
        steps = (end - origin + s.block - 1) // s.block
        seen_to = (start + 1 - origin) // s.block
        return Tile(
            row,
            group,
            token,
            context,
            queries,
            first_page,
            start,
            origin,
            steps,
            seen_from,
            seen_to,
        )

    def dead_tile(self, number: Any) -> tuple[Any, Any, Any]:
        """(row, head group, first token) of the number-th tile that holds no token."""
        shape = self.shape
        total = shape.tiles * shape.head_groups

        def past(place: Any) -> Any:
            row, before, tiles = place
            return row + 1, before + tiles, total - self.live_tiles(row + 1)

        zero = jnp.int32(0)
        place = (zero, zero, total - self.live_tiles(zero))
        if shape.batch > 1:
            place = jax.lax.while_loop(lambda p: number >= p[1] + p[2], past, place)
        row, before, tiles = place
        inside = number - before + (total - tiles)  # dead tiles come after the live ones
        token = inside // shape.head_groups * shape.tile_tokens
        return row, jax.lax.rem(inside, shape.head_groups), token
