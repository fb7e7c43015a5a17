"""Paged decode attention: one new token a sequence, grouped queries, split over pages.

A block owns (sequence, kv head, split) and streams its live pages through a ring of shared-memory
chunks; page numbers are read one step ahead of their copy. Both products are swap-AB wgmma: scores
[tokens, heads] = K q^T, output [dims, heads] = V^T p, so the few query heads of a group are padded
to 8 columns instead of 64 rows. Softmax is online, in base 2. With more than one split every block
leaves its normalised output and log-sum-exp, and a second kernel combines the live ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import (
    BARRIER_BYTES,
    WARPGROUP_THREADS,
    MosaicGpuKernel,
    f32,
    round_up,
    shared_array_bytes,
)
from pallas_kernels.weight_stream import (
    ACCUMULATOR,
    PER_COLUMN,
    PER_ROW,
    SWIZZLED,
    SWIZZLED_F32,
    store_transposed,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Schedule, Workload, Writes
from polyjax.core.ops import PAGED_ATTENTION

REDUCTION_SCRATCH_BYTES = 2048
LOG2_E = math.log2(math.e)
MASKED = -1e30  # a finite minus infinity: differences of two of them stay finite


@dataclasses.dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """`chunk` tokens a step, `stages` chunks in flight, `splits` blocks that share a sequence.

    `dependent_launch` lets the combining kernel start before the splits end.
    """

    chunk: int = 64
    stages: int = 4
    splits: int = 1
    dependent_launch: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    """The numbers of one workload and schedule that the body needs."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    columns_of_pages: int
    scale: float
    window: int
    soft_cap: float
    schedule: AttentionSchedule

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def columns(self) -> int:
        return padded_columns(self.group)

    def first_column(self, row: Any, kv_head: Any) -> Any:
        """Column of the group's first query head within its 8-aligned rows of q."""
        first = row * self.heads + kv_head * self.group
        return first % 8 if isinstance(first, int) else jax.lax.rem(first, 8)

    @property
    def pages_per_chunk(self) -> int:
        return max(1, self.schedule.chunk // self.page)

    @property
    def page_rows(self) -> int:
        """Tokens of one page that one chunk takes."""
        return min(self.page, self.schedule.chunk)


@dataclasses.dataclass(frozen=True)
class PagedDecodeAttention(MosaicGpuKernel):
    schedule_type: ClassVar[type[AttentionSchedule]] = AttentionSchedule

    def preferred(self, workload: Workload) -> bool:
        """It reads live pages only, at 0.76 to 0.90 of bandwidth; XLA gathers whole page tables."""
        return True

    def supports(self, workload: Workload) -> str | None:
        if workload["T"] != 1:
            return f"T={workload['T']}: this is a decode kernel, one new token a sequence"
        if workload.dtype("q") != jnp.bfloat16 or workload.dtype("kv") != jnp.bfloat16:
            return "q and kv must be bfloat16"
        if workload["H"] not in (64, 128):
            return f"head dim {workload['H']} is neither 64 nor 128"
        if workload["Z"] not in (16, 32, 64, 128):
            return f"page size {workload['Z']} is none of 16, 32, 64, 128"
        if workload["N"] // workload["K"] > 64:
            return f"{workload['N'] // workload['K']} query heads a kv head exceed 64"
        return None

    def _shape(self, workload: Workload, schedule: AttentionSchedule) -> Shape:
        return Shape(
            batch=workload["B"],
            heads=workload["N"],
            kv_heads=workload["K"],
            head_dim=workload["H"],
            page=workload["Z"],
            columns_of_pages=workload["C"],
            scale=workload.option("scale"),
            window=workload.option("window", 0),
            soft_cap=workload.option("soft_cap", 0.0),
            schedule=schedule,
        )

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[AttentionSchedule]:
        for chunk in (64, 128, 256):
            for stages in (2, 3, 4, 6, 8):
                for splits in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
                    for dependent in (False, True) if splits > 1 else (False,):
                        yield AttentionSchedule(chunk, stages, splits, dependent)

    def rank(
        self, workload: Workload, schedule: AttentionSchedule, chip: ChipSpec
    ) -> tuple[Any, ...]:
        """One block an SM and 192 tokens in flight did best on an H200."""
        wanted = max(1.0, chip.num_sms / (workload["B"] * workload["K"]))
        off = abs(math.log2(schedule.splits / wanted))
        in_flight = abs(schedule.stages * schedule.chunk - 192)
        return -off, -in_flight, -schedule.chunk, not schedule.dependent_launch

    def family(self, schedule: AttentionSchedule) -> tuple[Any, ...]:
        return schedule.chunk, schedule.splits

    def illegal(
        self, workload: Workload, schedule: AttentionSchedule, chip: ChipSpec
    ) -> str | None:
        tokens = workload["C"] * workload["Z"]
        if schedule.chunk not in (64, 128, 256):
            return f"chunk={schedule.chunk} is none of 64, 128, 256 (rows of wgmma, TMA box)"
        if schedule.stages < 2:
            return f"stages={schedule.stages}: the ring needs two"
        if schedule.splits < 1 or (schedule.splits - 1) * schedule.chunk >= tokens:
            return f"splits={schedule.splits} leave a block without one of the {tokens} tokens"
        columns = padded_columns(workload["N"] // workload["K"])
        if columns * (2 * schedule.chunk + workload["H"]) // WARPGROUP_THREADS > 160:
            return f"chunk={schedule.chunk} with {columns} columns needs too many registers"
        return None

    def shared_memory_bytes(self, workload: Workload, schedule: AttentionSchedule) -> int:
        columns = padded_columns(workload["N"] // workload["K"])
        total = shared_array_bytes(schedule.stages, 2, schedule.chunk, workload["H"], itemsize=2)
        total += shared_array_bytes(columns, workload["H"], itemsize=2)  # q
        total += shared_array_bytes(columns, schedule.chunk, itemsize=2)  # p
        total += shared_array_bytes(columns, workload["H"], itemsize=4)  # output staging
        return total + REDUCTION_SCRATCH_BYTES + (schedule.stages + 1) * BARRIER_BYTES + 1024

    def launch_shape(self, workload: Workload, schedule: AttentionSchedule) -> LaunchShape:
        """Of a bucket whose every page is live; the second kernel combines the splits."""
        s, shape = schedule, self._shape(workload, schedule)
        pairs, dim = shape.batch * shape.kv_heads, shape.head_dim
        steps = -(-shape.columns_of_pages * shape.page // (s.chunk * s.splits))
        step_bytes = 2 * s.chunk * dim * 2
        partials = 4 * shape.batch * shape.heads * (dim + 1) * s.splits if s.splits > 1 else 0
        return LaunchShape(
            pairs * s.splits,
            WARPGROUP_THREADS,
            shape.columns * (2 * s.chunk + dim) // WARPGROUP_THREADS + 60,
            float(pairs * shape.columns_of_pages * shape.page * 4 * dim + 2 * partials),
            float(min(s.stages, steps) * step_bytes),
            steps=steps,
            reductions=s.splits if s.splits > 1 else 0,  # the second kernel reads them one by one
            vector_ops=8.0 * steps * shape.columns * (s.chunk + dim),  # online softmax
            flops=float(pairs * s.splits * steps * 4 * s.chunk * dim * shape.columns),
            kernels=1 + (s.splits > 1),
        )

    def writing(self, schedule: AttentionSchedule) -> Any:
        return ()

    def plain(self, schedule: AttentionSchedule) -> AttentionSchedule:
        return dataclasses.replace(schedule, dependent_launch=False)

    def outputs(
        self, workload: Workload, schedule: AttentionSchedule
    ) -> tuple[tuple[int, ...], ...]:
        return ((workload["B"], workload["N"], workload["H"]),)

    def writes(self, workload: Workload, schedule: AttentionSchedule) -> Iterator[Writes]:
        shape = self._shape(workload, schedule)
        for b in range(shape.batch):
            for k in range(shape.kv_heads):
                yield Writes(
                    0, (b, *output_heads(k, shape.group), 0)[:3], (1, shape.group, shape.head_dim)
                )

    def build(self, workload: Workload, schedule: AttentionSchedule) -> Callable[..., Any]:
        shape = self._shape(workload, schedule)
        has_first = workload.has("first_pages")
        attend = _attention_kernel(shape, has_first)
        combine = _combine_kernel(shape) if schedule.splits > 1 else None

        def paged_attention(
            q: Any,
            kv: Any,
            page_table: Any,
            context_lens: Any,
            query_lens: Any,
            first_pages: Any = None,
        ) -> jax.Array:
            lens = jnp.where(query_lens > 0, context_lens, 0)
            extra = [first_pages] if first_pages is not None else []
            rows = q.reshape(shape.batch * shape.heads, shape.head_dim)
            if rows.shape[0] % 8:  # the copy engine takes tiles of 8 rows
                rows = jnp.pad(rows, ((0, -rows.shape[0] % 8), (0, 0)))
            # One axis for page, side and head: the copy engine addresses five dimensions.
            flat_kv = kv.reshape(-1, shape.page, shape.head_dim)
            out = attend(rows, flat_kv, page_table, lens, *extra)
            if combine is not None:
                out = combine(*out, lens, *extra)
            return out.reshape(q.shape)

        return paged_attention


def padded_columns(group: int) -> int:
    """Columns that hold any `group` consecutive query heads from a multiple of 8 (TMA tile) on."""
    return round_up(group, 8) if 8 % group == 0 or group % 8 == 0 else round_up(group + 7, 8)


def output_heads(kv_head: Any, group: int) -> tuple[Any]:
    """First query head of a kv head's output block: the write map and the body's stores."""
    return (kv_head * group,)


def _live_chunks(shape: Shape, length: Any, split: Any, first_page: Any) -> tuple[Any, Any, Any]:
    """(first token, number of chunks, first visible token) of a split."""
    visible = jnp.maximum(length - shape.window, 0) if shape.window else 0
    start = first_page * shape.page
    page_aligned = visible // shape.page * shape.page if shape.window else start
    origin = jnp.maximum(page_aligned, start)
    chunks = (length - origin + shape.schedule.chunk - 1) // shape.schedule.chunk
    per_split = (chunks + shape.schedule.splits - 1) // shape.schedule.splits
    first = split * per_split
    count = jnp.clip(chunks - first, 0, per_split)
    return origin + first * shape.schedule.chunk, count, visible


def _attention_kernel(shape: Shape, has_first: bool) -> Callable[..., Any]:
    split = shape.schedule.splits > 1
    heads, dim, columns = shape.heads, shape.head_dim, shape.columns
    if split:
        part = (shape.batch, shape.kv_heads, shape.schedule.splits, columns, dim)
        out_type: Any = (jax.ShapeDtypeStruct(part, f32), jax.ShapeDtypeStruct(part[:-1], f32))
    else:
        out_type = jax.ShapeDtypeStruct((shape.batch, heads, dim), jnp.bfloat16)

    def body(q_g: Any, kv_g: Any, pages_g: Any, lens_g: Any, *rest: Any, **scratch: Any) -> None:
        first_g = rest[0] if has_first else None
        _AttentionBody(shape, q_g, kv_g, pages_g, lens_g, first_g, rest[has_first:], scratch).run()

    s = shape.schedule
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(s.splits, shape.kv_heads, shape.batch),
        grid_names=("split", "kv_head", "row"),
        scratch_types={
            "kv_s": plgpu.SMEM((s.stages, 2, s.chunk, dim), jnp.bfloat16, transforms=SWIZZLED),
            "q_s": plgpu.SMEM((columns, dim), jnp.bfloat16, transforms=SWIZZLED),
            "p_s": plgpu.SMEM((columns, s.chunk), jnp.bfloat16, transforms=SWIZZLED),
            "out_s": plgpu.SMEM((columns, dim), f32, transforms=SWIZZLED_F32)
            if split
            else plgpu.SMEM((columns, dim), jnp.bfloat16),
            "log_s": plgpu.SMEM((columns,), f32),
            "ring": plgpu.Barrier(num_arrivals=2 * shape.pages_per_chunk, num_barriers=s.stages),
            "q_loaded": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTION_SCRATCH_BYTES
        ),
        kernel_name="paged_decode_attention",
    )


@dataclasses.dataclass
class _AttentionBody:
    """One block's program; methods in the order they run."""

    shape: Shape
    q_g: Any
    kv_g: Any
    pages_g: Any
    lens_g: Any
    first_g: Any
    outs_g: Any
    scratch: dict[str, Any]

    def run(self) -> None:
        shape, stages = self.shape, self.shape.schedule.stages
        self.row, self.kv_head = jax.lax.axis_index("row"), jax.lax.axis_index("kv_head")
        self.split = jax.lax.axis_index("split")
        self.length = self.lens_g[self.row]
        self.first_page = self.first_g[self.row] if self.first_g is not None else 0
        self.start, self.count, self.visible = _live_chunks(
            shape, self.length, self.split, self.first_page
        )
        if shape.schedule.dependent_launch:
            plgpu.griddepcontrol_launch_dependents()

        @pl.when(self.count > 0)
        def _live() -> None:
            first = self.row * shape.heads + output_heads(self.kv_head, shape.group)[0]
            rows = pl.ds(first // 8 * 8, shape.columns)
            plgpu.copy_gmem_to_smem(
                self.q_g.at[rows, :], self.scratch["q_s"], self.scratch["q_loaded"]
            )
            for i in range(stages):
                pl.when(i < self.count)(lambda i=i: self.fetch(i, self.page_numbers(i)))
            plgpu.barrier_wait(self.scratch["q_loaded"])
            self.attend()

        if shape.schedule.splits == 1:
            pl.when(self.count <= 0)(self.write_zeros)

    def page_numbers(self, chunk: Any) -> tuple[Any, ...]:
        """Pages of a chunk; past the last live page the last one again, whose copy is masked."""
        shape = self.shape
        token = self.start + chunk * shape.schedule.chunk
        last = (self.length - 1) // shape.page
        pages = []
        for i in range(shape.pages_per_chunk):
            page = jnp.minimum(token // shape.page + i, last)
            pages.append(self.pages_g[self.row, jnp.maximum(page - self.first_page, 0)])
        return tuple(pages)

    def fetch(self, chunk: Any, pages: tuple[Any, ...]) -> None:
        shape, rows = self.shape, self.shape.page_rows
        slot = jax.lax.rem(chunk, shape.schedule.stages)
        part: Any = 0  # which part of the page, where a page is longer than a chunk
        if shape.page > rows:
            part = jax.lax.rem(self.start // rows + chunk, shape.page // rows)
        for i, page in enumerate(pages):
            for side in range(2):  # keys, values
                index = (page * 2 + side) * shape.kv_heads + self.kv_head
                source = self.kv_g.at[index, pl.ds(part * rows, rows), :]
                destination = self.scratch["kv_s"].at[slot, side, pl.ds(i * rows, rows), :]
                plgpu.copy_gmem_to_smem(source, destination, self.scratch["ring"].at[slot])

    def attend(self) -> None:
        shape, stages = self.shape, self.shape.schedule.stages
        columns = (shape.columns,)
        peak = plgpu.layout_cast(jnp.full(columns, MASKED, f32), PER_COLUMN)
        total = plgpu.layout_cast(jnp.zeros(columns, f32), PER_COLUMN)
        out = plgpu.layout_cast(jnp.zeros((shape.head_dim, *columns), f32), ACCUMULATOR)

        def advance(chunk: Any, carry: Any) -> Any:
            peak, total, out, ahead = carry
            following = self.page_numbers(chunk + stages + 1)
            slot = jax.lax.rem(chunk, stages)
            plgpu.barrier_wait(self.scratch["ring"].at[slot])
            scores = self.scores(chunk, slot)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
            weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(new_peak, scores.shape, (1,)))
            shrink = jnp.exp2(peak - new_peak)
            total = total * shrink + jnp.sum(weights, axis=0)
            self.scratch["p_s"].T[...] = weights.astype(jnp.bfloat16)
            self.clear_dead_values(chunk, slot)
            plgpu.commit_smem()
            out = out * jax.lax.broadcast_in_dim(shrink, out.shape, (1,)) + self.weighted_values(
                slot
            )
            pl.when(chunk + stages < self.count)(lambda: self.fetch(chunk + stages, ahead))
            return new_peak, total, out, following

        ahead = self.page_numbers(stages)
        carry = (peak, total, out, ahead)
        peak, total, out, _ = jax.lax.fori_loop(0, self.count, advance, carry)
        self.store(peak, total, out)

    def scores(self, chunk: Any, slot: Any) -> jax.Array:
        """Masked scores [chunk, columns] in base 2."""
        shape, kv_s = self.shape, self.scratch["kv_s"]
        size = (shape.schedule.chunk, shape.columns)

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, kv_s.at[slot, 0], self.scratch["q_s"].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        raw = pl.run_scoped(product, plgpu.ACC(size, f32))
        if shape.soft_cap:
            raw = jnp.tanh(raw * (shape.scale / shape.soft_cap)) * (shape.soft_cap * LOG2_E)
        else:
            raw = raw * (shape.scale * LOG2_E)
        token = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=ACCUMULATOR)
        token = token + (self.start + chunk * shape.schedule.chunk)
        seen = token < self.length
        if shape.window:
            seen = jnp.logical_and(seen, token >= self.visible)
        return jnp.where(seen, raw, MASKED)

    def clear_dead_values(self, chunk: Any, slot: Any) -> None:
        """Zeroes values past the sequence: slots nobody owns may hold NaN, and 0 * NaN is NaN."""
        shape = self.shape
        token = self.start + chunk * shape.schedule.chunk

        @pl.when(token + shape.schedule.chunk > self.length)
        def _() -> None:
            values = self.scratch["kv_s"].at[slot, 1]
            size = (shape.schedule.chunk, shape.head_dim)
            position = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=ACCUMULATOR) + token
            loaded = plgpu.load(values, layout=ACCUMULATOR)
            values[...] = jnp.where(position < self.length, loaded.astype(f32), 0.0).astype(
                jnp.bfloat16
            )

    def weighted_values(self, slot: Any) -> jax.Array:
        shape = self.shape

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, self.scratch["kv_s"].at[slot, 1].T, self.scratch["p_s"].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((shape.head_dim, shape.columns), f32))

    def store(self, peak: jax.Array, total: jax.Array, out: jax.Array) -> None:
        shape, out_s = self.shape, self.scratch["out_s"]
        out = out / jax.lax.broadcast_in_dim(total, out.shape, (1,))
        store_transposed(out, out_s)
        self.scratch["log_s"][...] = peak + jnp.log2(total)
        plgpu.commit_smem()
        if shape.schedule.splits == 1:
            self.copy_out()
        else:
            part_g, log_g = self.outs_g
            plgpu.copy_smem_to_gmem(out_s, part_g.at[self.row, self.kv_head, self.split])
            plgpu.copy_smem_to_gmem(
                self.scratch["log_s"], log_g.at[self.row, self.kv_head, self.split]
            )
            plgpu.wait_smem_to_gmem(0)

    def copy_out(self) -> None:
        shape = self.shape
        heads = pl.ds(output_heads(self.kv_head, shape.group)[0], shape.group)
        column = shape.first_column(self.row, self.kv_head)
        source = self.scratch["out_s"].at[pl.ds(column, shape.group), :]
        plgpu.copy_smem_to_gmem(source, self.outs_g[0].at[self.row, heads, :])
        plgpu.wait_smem_to_gmem(0)

    def write_zeros(self) -> None:
        """A row without a token is zero."""
        shape = self.shape
        zeros = jnp.zeros((shape.head_dim, shape.columns), self.scratch["out_s"].dtype)
        self.scratch["out_s"].T[...] = plgpu.layout_cast(zeros, ACCUMULATOR)
        plgpu.commit_smem()
        self.copy_out()


def _combine_kernel(shape: Shape) -> Callable[..., Any]:
    """(parts [B,K,S,columns,H], logs [B,K,S,columns], lens [B]) -> [B,N,H].

    Weighs the live splits by 2^log.
    """
    splits = shape.schedule.splits

    def body(part_g: Any, log_g: Any, lens_g: Any, *rest: Any) -> None:
        first_g, out_g = (rest[0], rest[-1]) if len(rest) == 2 else (None, rest[0])
        head, row = jax.lax.axis_index("head"), jax.lax.axis_index("row")
        kv_head = head // shape.group
        column = shape.first_column(row, kv_head) + jax.lax.rem(head, shape.group)
        if shape.schedule.dependent_launch:
            plgpu.griddepcontrol_wait()
        length = lens_g[row]
        first_page = first_g[row] if first_g is not None else 0
        whole = shape.head_dim == WARPGROUP_THREADS
        layout = plgpu.Layout.WG_STRIDED((shape.head_dim,), 1) if whole else PER_ROW

        def live(split: Any) -> Any:
            return _live_chunks(shape, length, split, first_page)[1] > 0

        def log(split: Any) -> Any:
            return jnp.where(live(split), log_g[row, kv_head, split, column], MASKED)

        def part(split: Any) -> jax.Array:
            return plgpu.load(
                part_g.at[row, kv_head, split, column], layout=layout, optimized=whole
            )

        number = jnp.clip(_number_of_live(shape, length, first_page), 0, splits)
        peak = jax.lax.fori_loop(
            0, number, lambda s, m: jnp.maximum(m, log(s)), jnp.float32(MASKED)
        )

        def add(split: Any, carry: Any) -> Any:
            total, out = carry
            weight = jnp.exp2(log(split) - peak)
            return total + weight, out + part(split) * weight

        zero = plgpu.layout_cast(jnp.zeros((shape.head_dim,), f32), layout)
        total, out = jax.lax.fori_loop(0, number, add, (jnp.float32(0), zero))
        out = out / jnp.maximum(total, 1e-30)
        out_g.at[row, head][...] = out.astype(jnp.bfloat16)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.head_dim), jnp.bfloat16),
        grid=(shape.heads, shape.batch),
        grid_names=("head", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_combine",
    )


def _number_of_live(shape: Shape, length: Any, first_page: Any) -> Any:
    """Splits that have a token; they come first."""
    _, _, visible = _live_chunks(shape, length, 0, first_page)
    start = first_page * shape.page
    origin = jnp.maximum(visible // shape.page * shape.page if shape.window else start, start)
    chunks = (length - origin + shape.schedule.chunk - 1) // shape.schedule.chunk
    per_split = jnp.maximum((chunks + shape.schedule.splits - 1) // shape.schedule.splits, 1)
    return (chunks + per_split - 1) // per_split


KERNEL = PagedDecodeAttention(
    "mosaic_gpu.paged_attention.decode", PAGED_ATTENTION, frozenset({"tma", "wgmma", "bf16"})
)
