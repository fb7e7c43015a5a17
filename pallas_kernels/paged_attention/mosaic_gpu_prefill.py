"""Paged prefill and chunked attention: many new tokens a sequence, causal, over pages.

Persistent blocks take tiles (sequence, tokens x query heads of one kv head) in turn: the tiles of
each sequence that has tokens, its last and longest first, then the tiles that hold none and are
zeroed. One warpgroup brings in queries and pages (read once for all heads of a tile) through a ring
of shared memory; the others hold 64 rows each. Scores are q k^T, the output is p v with p in
registers, softmax is online, in base 2. A warpgroup asks for its next scores before it weighs the
values of the last, and several warpgroups ask in turns, so that the softmax of one runs beside the
products of another (FlashAttention-3, arXiv 2407.08608).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.base import (
    BARRIER_BYTES,
    MMA_ROWS,
    WARPGROUP_THREADS,
    MosaicGpuKernel,
    clipped,
    shared_array_bytes,
)
from pallas_kernels.paged_attention.prefill_body import REGISTERS, attention_kernel
from pallas_kernels.paged_attention.prefill_tiles import PrefillSchedule, Shape
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import PAGED_ATTENTION

OTHER_REGISTERS = 30  # of a consumer: addresses, loop state, maxima and sums


@dataclasses.dataclass(frozen=True)
class PagedPrefillAttention(MosaicGpuKernel):
    schedule_type: ClassVar[type[PrefillSchedule]] = PrefillSchedule

    def preferred(self, workload: Workload) -> bool:
        """The reference gathers whole page tables and writes float32 scores of all of them."""
        return True

    def supports(self, workload: Workload) -> str | None:
        if workload["T"] < 2:
            return "T=1: this is a prefill kernel, several new tokens a sequence"
        if workload.dtype("q") != jnp.bfloat16 or workload.dtype("kv") != jnp.bfloat16:
            return "q and kv must be bfloat16"
        if workload["H"] not in (64, 128, 256):
            return f"head dim {workload['H']} is none of 64, 128, 256"
        if workload["Z"] not in (16, 32, 64, 128):
            return f"page size {workload['Z']} is none of 16, 32, 64, 128"
        if not workload.option("scale") > 0:
            return f"scale={workload.option('scale')} is not positive: the maximum is of q k^T"
        return None

    def _shape(self, workload: Workload, schedule: PrefillSchedule) -> Shape:
        return Shape(
            batch=workload["B"],
            tokens=workload["T"],
            heads=workload["N"],
            kv_heads=workload["K"],
            head_dim=workload["H"],
            page=workload["Z"],
            scale=workload.option("scale"),
            window=workload.option("window", 0),
            soft_cap=workload.option("soft_cap", 0.0),
            schedule=schedule,
        )

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[PrefillSchedule]:
        for warpgroups, heads, block, stages in (
            (w, h, b, s)
            for w in (1, 2, 3)
            for h in _divisors(workload["N"] // workload["K"])
            for b in (64, 128, 192)
            for s in (2, 3, 4)
        ):
            tile = PrefillSchedule(warpgroups, heads, block, stages, 1)
            if self._tile_fault(workload, tile):
                continue
            shape = self._shape(workload, tile)
            blocks = min(chip.num_sms, shape.items)
            for side_by_side in sorted({shape.head_groups, min(2, shape.head_groups)}):
                if shape.head_groups % side_by_side:
                    continue
                for ahead in (False, True):
                    for turns in (False, True) if warpgroups > 1 else (False,):
                        for reuse in (False, True):
                            yield dataclasses.replace(
                                tile,
                                blocks=blocks,
                                side_by_side=side_by_side,
                                ahead=ahead,
                                turns=turns,
                                reuse_queries=reuse,
                                reallocate=warpgroups > 1,
                            )

    def rank(
        self, workload: Workload, schedule: PrefillSchedule, chip: ChipSpec
    ) -> tuple[Any, ...]:
        """Full SMs and full tiles first, then what was best on an H200.

        Taking turns won 7 % at most (8 prompts of 1,024 tokens, head dim 64) and lost up to a fifth
        (4 of 2,048: 294 against 250 us).
        """
        s, shape = schedule, self._shape(workload, schedule)
        busy = min(1.0, shape.items / chip.num_sms)
        filled = shape.tokens / (shape.tiles * shape.tile_tokens)
        wanted = 1 if shape.head_dim == 256 else 2
        return (
            round(busy * filled, 2),
            -abs(s.warpgroups - wanted),
            s.block == (64 if shape.head_dim == 256 else 128),
            s.heads,
            s.ahead,
            not s.turns,
            not s.reuse_queries,
            -s.stages,
            s.side_by_side,
        )

    def family(self, schedule: PrefillSchedule) -> tuple[Any, ...]:
        return schedule.warpgroups, schedule.block, schedule.ahead, schedule.turns

    def _tile_fault(self, workload: Workload, schedule: PrefillSchedule) -> str | None:
        s, rows = schedule, schedule.warpgroups * MMA_ROWS
        if s.warpgroups not in REGISTERS:
            return f"warpgroups={s.warpgroups} is none of {sorted(REGISTERS)}"
        if s.heads < 1 or workload["N"] // workload["K"] % s.heads:
            return f"heads={s.heads} do not divide the {workload['N'] // workload['K']} of a group"
        tokens = rows // s.heads
        aligned = tokens % MMA_ROWS == 0 or (MMA_ROWS % tokens == 0 and tokens >= 8)
        if rows % s.heads or not aligned:
            return f"heads={s.heads} do not divide {rows} rows into copies of 8 to 64"
        if s.block % 64 or not 64 <= s.block <= 256 or s.block % min(workload["Z"], s.block):
            return f"block={s.block} is no multiple of 64 to 256, or of the page"
        if workload["Z"] % min(workload["Z"], s.block):
            return f"block={s.block} does not divide a page of {workload['Z']}"
        registers = self._registers(workload, s)
        limit = REGISTERS[s.warpgroups][0]
        if registers > limit:
            return f"about {registers} registers a thread, {limit} are left"
        return None

    def _registers(self, workload: Workload, schedule: PrefillSchedule) -> int:
        """Of a consumer: output and scores in float32, the weights in flight and the next ones."""
        s = schedule
        weights = s.block // 4 if s.weights == "registers" and s.ahead else 0
        return workload["H"] // 2 + s.block // 2 + weights + OTHER_REGISTERS

    def illegal(self, workload: Workload, schedule: PrefillSchedule, chip: ChipSpec) -> str | None:
        fault = self._tile_fault(workload, schedule)
        if fault:
            return fault
        s, shape = schedule, self._shape(workload, schedule)
        if s.stages < 2:
            return f"stages={s.stages}: the ring needs two"
        if not 1 <= s.blocks <= shape.items:
            return f"blocks={s.blocks} is not between 1 and the {shape.items} tiles"
        if s.side_by_side < 1 or shape.head_groups % s.side_by_side:
            return f"side_by_side={s.side_by_side} does not divide {shape.head_groups} head groups"
        if s.turns and s.warpgroups == 1:
            return "turns=True: one warpgroup has nobody to take turns with"
        if s.weights not in ("registers", "shared"):
            return f"weights={s.weights!r} is neither 'registers' nor 'shared'"
        return None

    def shared_memory_bytes(self, workload: Workload, schedule: PrefillSchedule) -> int:
        s, dim, part = schedule, workload["H"], shared_array_bytes
        total = 2 * part(s.stages, s.block, dim, itemsize=2)
        total += part(s.warpgroups, MMA_ROWS, dim, itemsize=2) * (1 if s.reuse_queries else 2)
        if s.weights == "shared":
            total += part(s.warpgroups, MMA_ROWS, s.block, itemsize=2)
        barriers = 4 * s.stages + 3 * s.warpgroups + 1
        return total + barriers * BARRIER_BYTES + 1024

    def launch_shape(self, workload: Workload, schedule: PrefillSchedule) -> LaunchShape:
        """Of a bucket whose every token is new and whose every page is live."""
        s, shape = schedule, self._shape(workload, schedule)
        context, dim = workload["C"] * workload["Z"], shape.head_dim
        rows = s.warpgroups * MMA_ROWS
        mean = max(context - shape.tokens / 2, shape.tile_tokens)  # context that a token sees
        steps = -(-mean // s.block)
        tiles = -(-shape.items // s.blocks)
        step_bytes = 2 * s.block * dim * 2
        queries = 2 * rows * dim * 2
        return LaunchShape(
            s.blocks,
            (s.warpgroups + 1) * WARPGROUP_THREADS,
            self._registers(workload, s),
            float(shape.items * (steps * step_bytes + queries)),
            float(s.stages * step_bytes),
            steps=int(tiles * steps),
            tiles=tiles,
            vector_ops=8.0 * tiles * steps * rows * s.block,  # online softmax
            flops=float(shape.items * steps * 4 * rows * s.block * dim),
        )

    def writing(self, schedule: PrefillSchedule) -> Any:
        return schedule.warpgroups, schedule.heads

    def plain(self, schedule: PrefillSchedule) -> PrefillSchedule:
        return dataclasses.replace(schedule, weights="shared", accumulate=False)

    def outputs(self, workload: Workload, schedule: PrefillSchedule) -> tuple[tuple[int, ...], ...]:
        shape = self._shape(workload, schedule)
        return ((shape.batch, shape.padded_tokens, shape.heads, shape.head_dim),)

    def writes(self, workload: Workload, schedule: PrefillSchedule) -> Iterator[Writes]:
        shape = self._shape(workload, schedule)
        (bounds,) = self.outputs(workload, schedule)
        for row in range(shape.batch):
            for tile in range(shape.tiles):
                for group in range(shape.head_groups):
                    head, token = group * schedule.heads, tile * shape.tile_tokens
                    sizes = (1, shape.tile_tokens, schedule.heads, shape.head_dim)
                    yield clipped(bounds, (row, token, head, 0), sizes)

    def build(self, workload: Workload, schedule: PrefillSchedule) -> Callable[..., Any]:
        shape = self._shape(workload, schedule)
        attend = attention_kernel(shape, workload.has("first_pages"))
        padding = shape.padded_tokens - shape.tokens

        def paged_attention(
            q: Any,
            kv: Any,
            page_table: Any,
            context_lens: Any,
            query_lens: Any,
            first_pages: Any = None,
        ) -> jax.Array:
            extra = [first_pages] if first_pages is not None else []
            if padding:
                q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
            # One axis for page, side and head: the copy engine addresses five dimensions.
            flat_kv = kv.reshape(-1, shape.page, shape.head_dim)
            out = attend(q, flat_kv, page_table, context_lens, query_lens, *extra)
            return out[:, : shape.tokens] if padding else out

        return paged_attention


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


KERNEL = PagedPrefillAttention(
    "mosaic_gpu.paged_attention.prefill", PAGED_ATTENTION, frozenset({"tma", "wgmma", "bf16"})
)
