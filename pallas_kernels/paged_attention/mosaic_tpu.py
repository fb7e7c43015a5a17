"""Paged decode attention on a TPU: one new token a sequence, pages copied whole from HBM.

The pages of a sequence are taken in groups, all kv heads, keys and values with one copy a page. A
ring of groups is kept in flight, and it runs on into the next sequence: while the last groups of
one are computed, the first of the next are on their way. Per kv head the scores of its queries
(padded to 8 rows) are one product, the weighted values another; softmax is online. Dead slots may
hold anything, NaN included: a group with some has its dead values cleared before use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.base import round_up
from pallas_kernels.tpu_base import (
    LANES,
    RESERVED_BYTES,
    STEP_US,
    SUBLANES,
    MosaicTpuKernel,
    bf16,
    f32,
    i32,
    in_hbm,
    not_bfloat16,
    pallas_call,
    vmem_bytes,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Schedule, Workload, Writes
from polyjax.core.ops import PAGED_ATTENTION

MASKED = -1e30  # a finite minus infinity: differences of two of them stay finite
TRANSPOSED = (((1,), (1,)), ((), ()))  # q [G,H] times keys [S,H]


@dataclasses.dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """`pages` a group, `buffers` groups in the ring, `cores` shares of the sequences.

    With `unroll` the loop over kv heads is written out.
    """

    pages: int = 4
    buffers: int = 2
    cores: int = 1
    unroll: bool = False


@dataclasses.dataclass(frozen=True)
class PagedDecodeAttention(MosaicTpuKernel):
    schedule_type: ClassVar[type[AttentionSchedule]] = AttentionSchedule

    def supports(self, workload: Workload) -> str | None:
        if workload["T"] != 1:
            return f"T={workload['T']}: this is a decode kernel, one new token a sequence"
        if workload["H"] % 64:
            return f"head dim {workload['H']} is no multiple of 64"
        if workload["Z"] % 16:
            return f"page size {workload['Z']} is no multiple of 16"
        return not_bfloat16(workload, "q", "kv")

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[AttentionSchedule]:
        for pages in (1, 2, 4, 8, 16):
            for buffers in (2, 3, 4, 8):
                for cores in (1, 2):
                    for unroll in (False, True):
                        yield AttentionSchedule(pages, buffers, cores, unroll)

    def rank(
        self, workload: Workload, schedule: AttentionSchedule, chip: ChipSpec
    ) -> tuple[Any, ...]:
        """As many groups as cover a step's bookkeeping, few bytes before the first product."""
        group = schedule.pages * self._page_bytes(workload)
        share = chip.hbm_bytes_per_s / chip.num_sms * 1e-6
        groups = workload["B"] * -(-workload["C"] // schedule.pages)
        time_us = group / share + (groups * STEP_US) / schedule.cores
        return -time_us, -abs(schedule.buffers - 3), not schedule.unroll

    def family(self, schedule: AttentionSchedule) -> tuple[Any, ...]:
        return schedule.pages, schedule.buffers

    def illegal(
        self, workload: Workload, schedule: AttentionSchedule, chip: ChipSpec
    ) -> str | None:
        if schedule.pages < 1 or schedule.pages > workload["C"]:
            return f"groups of {schedule.pages} of {workload['C']} pages"
        if schedule.buffers < 2:
            return f"buffers={schedule.buffers}: the ring needs two"
        if schedule.cores not in range(1, chip.num_sms + 1):
            return f"cores={schedule.cores}: {chip.name} has {chip.num_sms}"
        if schedule.cores > workload["B"]:
            return f"cores={schedule.cores} share {workload['B']} sequences"
        if schedule.unroll and workload["K"] > 8:
            return f"{workload['K']} kv heads are too many to write out"
        return None

    def _page_bytes(self, workload: Workload) -> int:
        return 2 * workload["K"] * vmem_bytes(workload["Z"], workload["H"], dtype=bf16)

    def shared_memory_bytes(self, workload: Workload, schedule: AttentionSchedule) -> int:
        ring = schedule.buffers * schedule.pages * self._page_bytes(workload)
        rows, dim = padded_queries(workload), workload["H"]
        head = vmem_bytes(workload["K"], rows, dim, dtype=bf16)
        state = vmem_bytes(workload["K"], rows, dim, dtype=f32)
        state += 2 * vmem_bytes(workload["K"], rows, LANES, dtype=f32)
        tokens = schedule.pages * workload["Z"]
        scores = 4 * vmem_bytes(rows, tokens, dtype=f32) + 2 * vmem_bytes(tokens, dim, dtype=f32)
        return ring + 4 * head + state + scores + RESERVED_BYTES

    def writing(self, schedule: AttentionSchedule) -> Any:
        return schedule.cores

    def grid(self, workload: Workload, schedule: AttentionSchedule) -> tuple[int, ...]:
        return schedule.cores, -(-workload["B"] // schedule.cores)

    def outputs(
        self, workload: Workload, schedule: AttentionSchedule
    ) -> tuple[tuple[int, ...], ...]:
        """[B,K,padded query heads,H]."""
        rows = padded_queries(workload)
        return ((workload["B"], workload["K"], rows, workload["H"]),)

    def writes(self, workload: Workload, schedule: AttentionSchedule) -> Iterator[Writes]:
        (shape,) = self.outputs(workload, schedule)
        cores, per_core = self.grid(workload, schedule)
        for core in range(cores):
            for turn in range(per_core):
                row = core * per_core + turn
                if row < workload["B"]:
                    yield Writes(0, (row, 0, 0, 0), (1, *shape[1:]))

    def build(self, workload: Workload, schedule: AttentionSchedule) -> Callable[..., Any]:
        (shape,) = self.outputs(workload, schedule)
        cores, per_core = self.grid(workload, schedule)
        batch, heads, dim = workload["B"], workload["K"], workload["H"]
        group, rows = workload["N"] // heads, padded_queries(workload)
        last = batch - 1
        block = pl.BlockSpec(
            (1, *shape[1:]), lambda c, t, *_: (jnp.minimum(c * per_core + t, last), 0, 0, 0)
        )
        ring = schedule.buffers, schedule.pages, 2, heads, workload["Z"], dim
        call = pallas_call(
            _Body(workload, schedule, per_core),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(cores, per_core),
                in_specs=[block, in_hbm()],
                out_specs=block,
                scratch_shapes=[
                    pltpu.VMEM(ring, bf16),
                    pltpu.SemaphoreType.DMA((schedule.buffers,)),
                    pltpu.SMEM((3,), i32),
                    pltpu.VMEM((heads, rows, LANES), f32),
                    pltpu.VMEM((heads, rows, LANES), f32),
                    pltpu.VMEM((heads, rows, dim), f32),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(shape, bf16),
            compiler_params=self.params(workload, schedule, ("parallel", "arbitrary")),
            name="paged_attention",
        )

        def paged_attention(
            q: Any, kv: Any, page_table: Any, context_lens: Any, query_lens: Any,
            first_pages: Any = None,
        ) -> jax.Array:  # fmt: skip
            skipped = jnp.zeros_like(context_lens) if first_pages is None else first_pages
            lens = jnp.where(query_lens > 0, context_lens, 0)
            grouped = q.reshape(batch, heads, group, dim)
            grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
            first, pages = page_ranges(workload, lens, skipped)
            out = call(page_table, lens - skipped * workload["Z"], first, pages, grouped, kv)
            return out[:, :, :group].reshape(q.shape)

        return paged_attention


def padded_queries(workload: Workload) -> int:
    """Rows that the query heads of one kv head take."""
    return round_up(workload["N"] // workload["K"], SUBLANES)


def page_ranges(
    workload: Workload, lens: jax.Array, skipped: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First column of the page table that each row [B] sees, and how many; 0 without a token."""
    page, window = workload["Z"], workload.option("window", 0)
    tokens = jnp.maximum(lens - skipped * page, 0)
    first = jnp.maximum(tokens - window, 0) // page if window else jnp.zeros_like(tokens)
    end = jnp.minimum(-(-tokens // page), workload["C"])
    return first, jnp.maximum(end - first, 0)


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel. A group's number in the ring counts all groups of the core's sequences."""

    workload: Workload
    schedule: AttentionSchedule
    per_core: int

    def __call__(
        self, table: Any, tokens: Any, first: Any, pages: Any, q: Any, kv: Any, out: Any,
        ring: Any, ready: Any, cursor: Any, peak: Any, total: Any, weighted: Any,
    ) -> None:  # fmt: skip
        core, turn = pl.program_id(0), pl.program_id(1)
        row = core * self.per_core + turn
        end = jnp.minimum((core + 1) * self.per_core, self.workload["B"])
        copies = _Ring(self.schedule, table, first, pages, kv, ring, ready, cursor, end)

        @pl.when(turn == 0)
        def _start() -> None:
            copies.start(row)

        @pl.when(row < end)
        def _attend() -> None:
            peak[...] = jnp.full(peak.shape, MASKED, f32)
            total[...] = jnp.zeros(total.shape, f32)
            weighted[...] = jnp.zeros(weighted.shape, f32)

            def take(group: Any, _: None) -> None:
                copies.fetch_next()
                buffer = copies.wait(row, group)
                self.fold(tokens[row], first[row], group, buffer, q, peak, total, weighted)
                copies.release()

            jax.lax.fori_loop(0, copies.groups(row), take, None)
            seen = total[:, :, :1]
            out[0] = (weighted[...] / jnp.where(seen == 0.0, 1.0, seen)).astype(bf16)

    def fold(
        self, length: Any, first: Any, group: Any, buffer: Any, q: Any, peak: Any, total: Any,
        weighted: Any,
    ) -> None:  # fmt: skip
        """Folds a group into the running softmax of every head; `length` counts table slots."""
        page, window = self.workload["Z"], self.workload.option("window", 0)
        size = self.schedule.pages * page
        start = (first + group * self.schedule.pages) * page
        lowest = length - window if window else 0

        def live(positions: jax.Array) -> jax.Array:
            seen = positions < length
            return jnp.logical_and(seen, positions >= lowest) if window else seen

        partial = start + size > length
        if window:
            partial = jnp.logical_or(partial, start < lowest)

        @pl.when(partial)
        def _clear_dead_values() -> None:
            slot = jax.lax.broadcasted_iota(i32, (page, self.workload["H"]), 0)

            def clear(index: Any, _: None) -> None:
                heads = self.workload["K"]
                which, head = jax.lax.div(index, heads), jax.lax.rem(index, heads)
                values = buffer.at[which, 1, head]
                seen = live(start + which * page + slot)
                values[...] = jnp.where(seen, values[...].astype(f32), 0.0).astype(bf16)

            jax.lax.fori_loop(0, self.schedule.pages * self.workload["K"], clear, None)

        rows = q.shape[2]
        mask = live(start + jax.lax.broadcasted_iota(i32, (rows, size), 1))

        def head(k: Any, _: None) -> None:
            keys = buffer[:, 0, k].reshape(size, -1)
            values = buffer[:, 1, k].reshape(size, -1)
            scores = jax.lax.dot_general(q[0, k], keys, TRANSPOSED, preferred_element_type=f32)
            scores = self.scaled(scores)
            scores = jnp.where(mask, scores, MASKED)
            before = peak[k, :, :1]
            higher = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.where(mask, jnp.exp(scores - higher), 0.0)
            fade = jnp.exp(before - higher)
            peak[k] = jnp.broadcast_to(higher, peak.shape[1:])
            sums = total[k, :, :1] * fade + jnp.sum(weights, axis=-1, keepdims=True)
            total[k] = jnp.broadcast_to(sums, total.shape[1:])
            products = jnp.dot(weights.astype(bf16), values, preferred_element_type=f32)
            weighted[k] = weighted[k] * fade + products

        heads = self.workload["K"]
        jax.lax.fori_loop(0, heads, head, None, unroll=heads if self.schedule.unroll else 1)

    def scaled(self, scores: jax.Array) -> jax.Array:
        scores = scores * self.workload.option("scale")
        soft_cap = self.workload.option("soft_cap", 0.0)
        return soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Groups of pages on their way to VMEM, in the order in which they are used.

    `cursor` in SMEM is the next group to fetch (row and group), and how many are taken.
    """

    schedule: AttentionSchedule
    table: Any
    first: Any
    pages: Any
    kv: Any
    ring: Any
    ready: Any
    cursor: Any
    end: Any

    def groups(self, row: Any) -> Any:
        return pl.cdiv(self.pages[row], self.schedule.pages)

    def start(self, row: Any) -> None:
        """Fetches the first groups of the core's first rows: all buffers but one."""
        self.cursor[0] = self.next_row(row)
        self.cursor[1] = 0
        self.cursor[2] = 0
        for ahead in range(self.schedule.buffers - 1):
            self.fetch(ahead)

    def next_row(self, row: Any) -> Any:
        """The first row from `row` on that has pages, or `end`."""
        last = self.end - 1
        idle = lambda r: (r < self.end) & (self.pages[jnp.minimum(r, last)] == 0)  # noqa: E731
        return jax.lax.while_loop(idle, lambda r: r + 1, row)

    def fetch_next(self) -> None:
        """Fetches the group that is as far ahead as the ring allows."""
        self.fetch(self.cursor[2] + self.schedule.buffers - 1)

    def fetch(self, number: Any) -> None:
        """Starts the copies of the group at the cursor, if there is one, and moves the cursor."""
        row, group = self.cursor[0], self.cursor[1]

        @pl.when(row < self.end)
        def _fetch() -> None:
            self.copies(row, group, jax.lax.rem(number, self.schedule.buffers), "start")
            ends = group + 1 == self.groups(row)
            self.cursor[1] = jnp.where(ends, 0, group + 1)

            @pl.when(ends)
            def _next_row() -> None:
                self.cursor[0] = self.next_row(row + 1)

    def wait(self, row: Any, group: Any) -> Any:
        """Waits for the group that is taken next; returns its buffer [pages,2,K,Z,H]."""
        slot = jax.lax.rem(self.cursor[2], self.schedule.buffers)
        self.copies(row, group, slot, "wait")
        return self.ring.at[slot]

    def release(self) -> None:
        self.cursor[2] = self.cursor[2] + 1

    def copies(self, row: Any, group: Any, slot: Any, action: str) -> None:
        """Starts or awaits the copy of every live page of a group."""
        last = self.kv.shape[0] - 1
        for i in range(self.schedule.pages):
            column = group * self.schedule.pages + i

            @pl.when(column < self.pages[row])
            def _copy(i: int = i, column: Any = column) -> None:
                page = jnp.clip(self.table[row, self.first[row] + column], 0, last)
                source, target = self.kv.at[page], self.ring.at[slot, i]
                getattr(pltpu.make_async_copy(source, target, self.ready.at[slot]), action)()


KERNEL = PagedDecodeAttention("mosaic_tpu.paged_attention.decode", PAGED_ATTENTION)
