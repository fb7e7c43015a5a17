"""Attention input: RMSNorm, QKV projection, qk-norm and RoPE in one weight stream, then the write.

A tile of the stream is one or more kv heads: their query heads, key and value are products of
their own, so that heads of any size stay whole. New keys and values leave it in float32, which
`kv_write`'s kernel merges into the pool's tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
from jax.experimental import pallas as pl

from pallas_kernels.base import clipped
from pallas_kernels.kv_write.mosaic_tpu import RowWriter, unsupported_pool
from pallas_kernels.tpu_base import bf16, f32, normalised, sequential, vmem_bytes, whole
from pallas_kernels.tpu_rows import rotated, whole_head_angles
from pallas_kernels.tpu_stream import (
    Epilogue,
    Position,
    Stream,
    TpuStreamKernel,
    TpuStreamSchedule,
    unsupported,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import NORM_QKV_ROPE_WRITE

MAX_PRODUCTS = 24  # heads a tile, each with its own code


@dataclasses.dataclass(frozen=True)
class QkvSchedule(TpuStreamSchedule):
    """`tile_n` counts kv heads, 0 for all; `write_rows` rows a step of the write, 0 for all."""

    tile_n: int = 1
    write_rows: int = 16


@dataclasses.dataclass(frozen=True)
class StreamQkv(TpuStreamKernel):
    schedule_type: ClassVar[type[QkvSchedule]] = QkvSchedule
    tiles_n: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 5, 8, 16, 0)

    def supports(self, workload: Workload) -> str | None:
        if workload.has("cos_sin") and (workload["R"] > workload["H"] or workload["R"] % 2):
            return f"RoPE of {workload['R']} of {workload['H']} dims"
        arrays = "x", "norm", "w", "bias", "q_norm", "k_norm"
        return unsupported_pool(workload) or unsupported(workload, workload["D"], *arrays)

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[QkvSchedule]:
        for stream in super().space(workload, chip):
            for rows in (0, 16, 32, 64):
                yield QkvSchedule(**stream.to_json(), write_rows=rows)

    def stream(self, workload: Workload, schedule: TpuStreamSchedule) -> Stream:
        return Stream(
            rows=workload["M"],
            groups=workload["C"],
            outputs=workload["H"],
            depth=workload["D"],
            schedule=schedule,
            normalised=True,
            by_group=True,
            units=workload["K"],
        )

    def writer(self, workload: Workload, schedule: Any) -> RowWriter:
        rows = schedule.write_rows or workload["M"]
        return RowWriter(workload["M"], workload["K"], workload["H"], workload["Z"], rows)

    def illegal(
        self, workload: Workload, schedule: TpuStreamSchedule, chip: ChipSpec
    ) -> str | None:
        rows = self.writer(workload, schedule).block
        if rows != workload["M"] and (rows % 16 or rows >= workload["M"]):
            return f"write_rows={rows} are neither all rows nor fewer and a multiple of 16"
        if rows > 64:
            return "more than 64 rows a step compare their tiles pair by pair"
        if self.stream(workload, schedule).products > MAX_PRODUCTS:
            return f"more than {MAX_PRODUCTS} products a step compile for minutes"
        return super().illegal(workload, schedule, chip)

    def extra_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        """Results, angles, biases and a few heads' temporaries; never less than the write takes."""
        stream, dim = self.stream(workload, schedule), workload["H"]
        row = vmem_bytes(stream.tile_m, dim, dtype=f32)
        total = 2 * stream.products * row + 4 * row + 4 * row
        total += 2 * vmem_bytes(dim, dim, dtype=f32) + 4 * vmem_bytes(1, dim, dtype=bf16)
        if workload.has("bias"):
            total += 2 * stream.products * vmem_bytes(1, dim, dtype=bf16)
        return max(total, self.writer(workload, schedule).vmem_bytes() - stream.vmem_bytes())

    def rank(self, workload: Workload, schedule: Any, chip: ChipSpec) -> tuple[Any, ...]:
        return *super().rank(workload, schedule, chip), schedule.write_rows == 16

    def outputs(
        self, workload: Workload, schedule: TpuStreamSchedule
    ) -> tuple[tuple[int, ...], ...]:
        """Queries [K,G,M,H], and the new keys and values [2,K,M,H] that go to the pool's slots."""
        heads, rows, dim = workload["K"], workload["M"], workload["H"]
        return (heads, workload["C"] - 2, rows, dim), (2, heads, rows, dim)

    def writes(self, workload: Workload, schedule: TpuStreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        q_shape, new_shape = self.outputs(workload, schedule)
        heads, dim = stream.products // stream.groups, workload["H"]
        cores, blocks, turns, _ = stream.grid
        for i in range(blocks):
            for core in range(cores):
                for turn in range(turns):
                    head, row = stream.tile_of(core, turn) * heads, i * stream.tile_m
                    start = head, 0, row, 0
                    yield clipped(q_shape, start, (heads, q_shape[1], stream.tile_m, dim))
                    start = 0, head, row, 0
                    yield clipped(new_shape, start, (2, heads, stream.tile_m, dim), 1)

    def build(self, workload: Workload, schedule: Any) -> Callable[..., Any]:
        stream, dim = self.stream(workload, schedule), workload["H"]
        heads, queries = stream.products // stream.groups, workload["C"] - 2
        rotary = workload.get("R") if workload.has("cos_sin") else 0
        eps = workload.option("eps")
        has_bias = workload.has("bias")
        norms = [name for name in ("q_norm", "k_norm") if workload.has(name)]
        extra = [stream.group_spec(stream.products, 1, dim)] * has_bias
        extra += [whole(1, dim)] * len(norms) + [stream.row_spec(dim)] * (2 * bool(rotary))

        def body(extras: Sequence[Any], outputs: Sequence[Any], _: Sequence[Any]) -> Epilogue:
            queue = list(extras)
            bias_ref = queue.pop(0) if has_bias else None
            norm_refs = {name: queue.pop(0) for name in norms}
            q_ref, new_ref = outputs

            def finished(total: jax.Array, product: int, norm: str) -> jax.Array:
                """A query or key head with all that follows the product, rounded as apart."""
                if bias_ref is not None:
                    total = total + bias_ref[product].astype(f32)
                head = total.astype(bf16)
                if norm in norm_refs:
                    head = normalised(head, norm_refs[norm][...], eps)
                if rotary and norm:
                    head = rotated(head, queue[0][...], queue[1][...], rotary)
                return head

            def epilogue(_: Position, sums: list[jax.Array]) -> None:
                for unit in range(heads):
                    first = unit * stream.groups
                    for g in range(queries):
                        q_ref[unit, g] = finished(sums[first + g], first + g, "q_norm")
                    key, value = first + queries, first + queries + 1
                    new_ref[0, unit] = finished(sums[key], key, "k_norm").astype(f32)
                    new_ref[1, unit] = finished(sums[value], value, "").astype(f32)

            return epilogue

        tile = stream.tile_of
        new_spec = pl.BlockSpec(
            (2, heads, stream.tile_m, dim), lambda c, i, t, k: (0, tile(c, t), i, 0)
        )
        q_shape, new_shape = self.outputs(workload, schedule)
        project = stream.call(
            body,
            self.stream_params(workload, schedule),
            "norm_qkv_rope",
            extra,
            [stream.group_spec(heads, queries, stream.tile_m, dim, rows_at=2), new_spec],
            [jax.ShapeDtypeStruct(q_shape, bf16), jax.ShapeDtypeStruct(new_shape, f32)],
            eps=eps,
        )
        params = self.params(workload, schedule, sequential(1))
        write = self.writer(workload, schedule).call(params)

        def norm_qkv_rope_write(
            x: Any, norm: Any, w: Any, bias: Any, q_norm: Any, k_norm: Any, cos_sin: Any,
            kv: Any, slots: Any,
        ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
            arrays = [] if bias is None else [bias.reshape(-1, 1, dim)]
            arrays += [weight[None] for weight in (q_norm, k_norm) if weight is not None]
            arrays += [] if cos_sin is None else list(whole_head_angles(cos_sin, dim))
            q, new = project(x, norm[None], w.reshape(-1, *w.shape[2:]), *arrays)
            return q.transpose(2, 0, 1, 3).reshape(x.shape[0], -1, dim), write(slots, new, kv)

        return norm_qkv_rope_write


STREAM = StreamQkv("mosaic_tpu.norm_qkv_rope_write.stream", NORM_QKV_ROPE_WRITE)
