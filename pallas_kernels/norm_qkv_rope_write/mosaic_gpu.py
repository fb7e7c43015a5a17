"""Attention input in one kernel: RMSNorm, fused QKV projection, qk-norm, RoPE, paged KV write.

A tile is one head. RoPE pairs dim i with dim i + H/2, so a block multiplies two groups of 64 weight
rows that meet elementwise: the two halves of a head of 128 dims, or a head of 64 dims and the same
head with its halves swapped (the second copy comes from L2, not from memory). Queries are stored as
[M, heads, H]; keys and values go straight to their slots of the pool, which is updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.base import MMA_ROWS, f32, shared_array_bytes
from pallas_kernels.stream_kernel import StreamKernel, unsupported, with_norm
from pallas_kernels.weight_stream import (
    ACCUMULATOR,
    PER_ROW,
    SWIZZLED_F32,
    Stream,
    StreamSchedule,
    store_transposed,
)
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import NORM_QKV_ROPE_WRITE

QUERY, KEY, VALUE = 0, 1, 2


def head_kind(head: Any, group: int) -> tuple[Any, Any]:
    """(kv head, index among its group + 2 heads): the write map and the body's stores."""
    kv_head = head // (group + 2)
    return kv_head, head - kv_head * (group + 2)


@dataclasses.dataclass(frozen=True)
class StreamQkv(StreamKernel):
    norms: ClassVar[tuple[bool, ...]] = (False, True)

    def supports(self, workload: Workload) -> str | None:
        dim = workload["H"]
        if dim not in (64, 128):
            return f"head dim {dim} is neither 64 nor 128"
        if workload.has("cos_sin") and workload["R"] != dim:
            return f"RoPE of {workload['R']} of {dim} dims: only whole heads are rotated"
        if workload.dtype("kv") != jnp.bfloat16:
            return "kv must be bfloat16"
        return unsupported(workload, workload["M"], workload["D"], "x", "norm", "w", groups=2)

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        copies = 2 if workload["H"] == 2 * MMA_ROWS else 3
        heads = workload["K"] * workload["C"]
        normalised = not schedule.separate_norm
        return Stream(workload["M"], 2, heads, workload["D"], schedule, normalised, copies)

    def extra_bytes(self, workload: Workload, schedule: StreamSchedule) -> int:
        columns, dim = self.stream(workload, schedule).columns, workload["H"]
        staged = shared_array_bytes(columns, dim, itemsize=2)
        return staged + 2 * shared_array_bytes(columns, MMA_ROWS, itemsize=4) + 3 * 1024

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        """q, and the new rows [M,2,K,H] that go to the pool's slots."""
        rows, kv_heads, dim = workload["M"], workload["K"], workload["H"]
        return (rows, kv_heads * (workload["C"] - 2), dim), (rows, 2, kv_heads, dim)

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        rows, group, dim = workload["M"], workload["C"] - 2, workload["H"]
        for head in range(workload["K"] * workload["C"]):
            kv_head, index = head_kind(head, group)
            if index < group:
                yield Writes(0, (0, kv_head * group + index, 0), (rows, 1, dim))
            else:
                yield Writes(1, (0, index - group, kv_head, 0), (rows, 1, 1, dim))

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream, dim = self.stream(workload, schedule), workload["H"]
        rows, heads = workload["M"], workload["K"] * (workload["C"] - 2)
        given = dict(workload.dtypes)
        names: tuple[str, ...] = ("bias", "q_norm", "k_norm", "cos_sin")
        optional = [name for name in names if name in given]

        def body(*refs: Any, **scratch: Any) -> None:
            _QkvBody(workload, schedule, stream, optional, refs, scratch).run()

        scratch_types = stream.scratch() | {
            "head_s": plgpu.SMEM((stream.columns, dim), jnp.bfloat16),
            "vector_s": plgpu.SMEM((2 * MMA_ROWS,), f32),
            "slots_s": plgpu.SMEM((stream.columns,), jnp.int32),
            "slots_ready": plgpu.Barrier(),
        }
        if "cos_sin" in given:
            shape = (2, stream.columns, MMA_ROWS)
            _, count = angle_copies(stream.columns, dim == MMA_ROWS)
            arrivals = 2 * count * (2 * MMA_ROWS // dim)
            scratch_types["angle_s"] = plgpu.SMEM(shape, f32, transforms=SWIZZLED_F32)
            scratch_types["angle_ready"] = plgpu.Barrier(num_arrivals=arrivals)
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((rows, heads, dim), jnp.bfloat16),
            scratch_types=scratch_types,
            kernel_name="norm_qkv_rope_write_stream",
            **stream.launch(),
        )

        project = with_norm(kernel, schedule, workload.option("eps"))

        def attention_input(
            x: Any,
            norm: Any,
            w: Any,
            bias: Any,
            q_norm: Any,
            k_norm: Any,
            cos_sin: Any,
            kv: Any,
            slots: Any,
        ) -> tuple[jax.Array, jax.Array]:
            bias = None if bias is None else bias.reshape(-1)
            given = [a for a in (bias, q_norm, k_norm, cos_sin) if a is not None]
            pool = jax.new_ref(kv.reshape(-1, dim))
            q = project(x, norm, w.reshape(-1, dim, w.shape[-1]), *given, slots, pool)
            return q, jax.freeze(pool).reshape(kv.shape)

        return attention_input


def angle_copies(columns: int, swapped: bool) -> tuple[int, int]:
    """(rows, count) of the copies that fetch one part of the angles.

    Half a tile's width in shared memory is contiguous only within 8 rows.
    """
    return (8, columns // 8) if swapped else (columns, 1)


@dataclasses.dataclass
class _QkvBody:
    """One block's program around the weight stream."""

    workload: Workload
    schedule: StreamSchedule
    stream: Stream
    optional: list[str]
    refs: tuple[Any, ...]
    scratch: dict[str, Any]

    def run(self) -> None:
        x_g, *rest = self.refs
        norm_g = None if self.schedule.separate_norm else rest.pop(0)
        self.w_g, *rest, self.slots_g, self.pool_g, self.q_g = rest
        self.given = dict(zip(self.optional, rest, strict=True))
        self.dim, self.group = self.workload["H"], self.workload["C"] - 2
        self.half = self.dim // 2
        self.swapped = self.dim == MMA_ROWS
        self.stream.run(
            x_g,
            self.load,
            self.epilogue,
            self.scratch,
            norm_g,
            self.workload.option("eps"),
            after_wait=self.load_rows,
        )

    def load(self, head: Any, k: Any, destination: Any, barrier: Any) -> None:
        def copy(first: int, size: int, group: int, at: int) -> None:
            source = self.w_g.at[head, pl.ds(first, size), pl.ds(k, self.schedule.tile_k)]
            plgpu.copy_gmem_to_smem(source, destination.at[group, pl.ds(at, size), :], barrier)

        copy(0, MMA_ROWS, 0, 0)
        if self.swapped:
            copy(self.half, self.half, 1, 0)
            copy(0, self.half, 1, self.half)
        else:
            copy(MMA_ROWS, MMA_ROWS, 1, 0)

    def load_rows(self) -> None:
        """Fills slots_s, and angle_s: cosines and sines by row, dims as in the first sums."""
        slots = self.slots_g.at[pl.ds(0, self.stream.columns)]
        plgpu.copy_gmem_to_smem(slots, self.scratch["slots_s"], self.scratch["slots_ready"])
        if "cos_sin" in self.given:
            self.load_angles()
        plgpu.barrier_wait(self.scratch["slots_ready"])

    def load_angles(self) -> None:
        ready = self.scratch["angle_ready"]
        for part in range(2):  # cosines, then sines
            size, count = angle_copies(self.stream.columns, self.swapped)

            def copy(j: Any, _: Any, part: int = part, size: int = size) -> None:
                rows, columns = pl.ds(j * size, size), pl.ds(part * self.half, self.half)
                source = self.given["cos_sin"].at[rows, columns]
                for i in range(MMA_ROWS // self.half):
                    dims = pl.ds(i * self.half, self.half)
                    target = self.scratch["angle_s"].at[part, rows, dims]
                    plgpu.copy_gmem_to_smem(source, target, ready)

            jax.lax.fori_loop(0, count, copy, None)
        plgpu.barrier_wait(ready)

    @property
    def shape(self) -> tuple[int, int]:
        return MMA_ROWS, self.stream.columns

    def epilogue(self, head: Any, sums: list[jax.Array]) -> None:
        kv_head, index = head_kind(head, self.group)
        first, second = sums
        if "bias" in self.given:
            first, second = (
                y + b for y, b in zip(sums, self.per_dim("bias", head * self.dim), strict=True)
            )
        kind = jnp.maximum(index - self.group + 1, 0)
        first, second = self.normalise(first, second, kind)
        if "cos_sin" in self.given:
            first, second = self.rotate(first, second, kind != VALUE)
        self.store(kv_head, index, first, second)

    def per_dim(self, name: str, start: Any) -> tuple[jax.Array, jax.Array]:
        """H values of a vector from `start`, as addends or factors of the two groups of sums."""

        def spread(vector: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(vector, self.shape, (0,))

        def load(ref: Any, at: Any) -> jax.Array:
            source = ref.at[pl.ds(at, MMA_ROWS)]
            return plgpu.load(source, layout=PER_ROW, optimized=False).astype(f32)

        first = load(self.given[name], start)
        if not self.swapped:
            return spread(first), spread(load(self.given[name], start + MMA_ROWS))
        vector_s = self.scratch["vector_s"]  # twice in a row: the swapped halves are its middle
        for i in range(2):
            vector_s[pl.ds(i * MMA_ROWS, MMA_ROWS)] = first
        return spread(first), spread(load(vector_s, self.half))

    def normalise(self, first: Any, second: Any, kind: Any) -> tuple[jax.Array, jax.Array]:
        """RMSNorm of a query or key head over its dims."""
        for name, wanted in (("q_norm", QUERY), ("k_norm", KEY)):
            if name not in self.given:
                continue
            squares = first * first if self.swapped else first * first + second * second
            mean = jnp.sum(squares, axis=0) / self.dim
            scale = jax.lax.rsqrt(mean + self.workload.option("eps"))
            scale = jax.lax.broadcast_in_dim(scale, self.shape, (1,))
            applies = jax.lax.broadcast(kind == wanted, self.shape)
            weights = self.per_dim(name, 0)
            first, second = (
                jnp.where(applies, y * scale * weight, y)
                for y, weight in zip((first, second), weights, strict=True)
            )
        return first, second

    def rotate(self, first: Any, second: Any, rotates: Any) -> tuple[jax.Array, jax.Array]:
        cos, sin = (
            plgpu.load(self.scratch["angle_s"].at[part].T, layout=ACCUMULATOR, optimized=False)
            for part in range(2)
        )
        rotates = jax.lax.broadcast(rotates, self.shape)
        cos, sin = jnp.where(rotates, cos, 1.0), jnp.where(rotates, sin, 0.0)
        if not self.swapped:
            return first * cos - second * sin, second * cos + first * sin
        row = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=ACCUMULATOR)
        return first * cos + second * jnp.where(row < self.half, -sin, sin), second

    def store(self, kv_head: Any, index: Any, first: jax.Array, second: jax.Array) -> None:
        """Stages the head as [columns, H] rows and copies them to its query or its slots."""
        head_s = self.scratch["head_s"]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_transposed(first, head_s.at[:, pl.ds(0, MMA_ROWS)])
        if not self.swapped:
            store_transposed(second, head_s.at[:, pl.ds(MMA_ROWS, MMA_ROWS)])
        plgpu.commit_smem()
        pl.when(index < self.group)(lambda: self.store_query(kv_head, index))
        pl.when(index >= self.group)(lambda: self.store_kv(kv_head, index - self.group))

    def store_query(self, kv_head: Any, index: Any) -> None:
        rows = pl.ds(0, self.stream.columns)
        target = self.q_g.at[rows, kv_head * self.group + index, :]
        plgpu.copy_smem_to_gmem(self.scratch["head_s"], target)

    def store_kv(self, kv_head: Any, side: Any) -> None:
        """Rows of the pool viewed [P*2*K*Z, H]: (page, side, head, offset) of each token's slot."""
        page_size, kv_heads = self.workload["Z"], self.workload["K"]

        def copy(m: Any, _: Any) -> None:
            slot = self.scratch["slots_s"][m]
            page = slot // page_size
            row = ((page * 2 + side) * kv_heads + kv_head) * page_size + slot - page * page_size
            plgpu.copy_smem_to_gmem(self.scratch["head_s"].at[m], self.pool_g.at[row])

        jax.lax.fori_loop(0, self.stream.rows, copy, None)


STREAM = StreamQkv("mosaic_gpu.norm_qkv_rope_write.stream", NORM_QKV_ROPE_WRITE)
