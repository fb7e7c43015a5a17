"""LM head with fused sampling: logits live in registers, a block keeps its best token per row.

Each tile's logits get their row's temperature and Gumbel noise (polyjax/core/noise.py) where they
are computed. A block's candidates are reduced over blocks by XLA: highest value, lowest id on ties.
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
from pallas_kernels.lm_head.mosaic_gpu import capped, head_stream, illegal_rows, load_rows
from pallas_kernels.stream_kernel import StreamKernel, unsupported, with_norm
from pallas_kernels.weight_stream import ACCUMULATOR, PER_COLUMN, Stream, StreamSchedule
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.noise import gumbel_of, row_keys
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import LM_HEAD_SAMPLE

NO_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class StreamSample(StreamKernel):
    max_split: ClassVar[int] = 1  # the vocabulary gives every block tiles enough
    tile_rows: ClassVar[tuple[int, ...]] = (MMA_ROWS, 2 * MMA_ROWS)
    norms: ClassVar[tuple[bool, ...]] = (False, True)

    def preferred(self, workload: Workload) -> bool:
        """Up to 16 rows it costs what a bare LM head costs; at 64 rows XLA's takes 0.56 of it."""
        return workload["M"] <= 16

    def supports(self, workload: Workload) -> str | None:
        if workload["V"] % 8 or workload["V"] < MMA_ROWS:
            return f"V={workload['V']} is no multiple of 8 of at least {MMA_ROWS}"
        if workload["M"] > 64:
            return f"M={workload['M']} exceeds 64 rows, whose best tokens fit in registers"
        return unsupported(workload, workload["M"], workload["D"], "x", "norm", "w")

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        return head_stream(workload, schedule)

    def extra_bytes(self, workload: Workload, schedule: StreamSchedule) -> int:
        columns = self.stream(workload, schedule).columns
        return 2 * shared_array_bytes(MMA_ROWS, columns, itemsize=4) + 5 * 1024

    def illegal(self, workload: Workload, schedule: StreamSchedule, chip: ChipSpec) -> str | None:
        if schedule.blocks > 4 * chip.num_sms:
            return f"blocks={schedule.blocks} leave more candidates than one reduction should read"
        return illegal_rows(workload, schedule) or super().illegal(workload, schedule, chip)

    def launch_shape(self, workload: Workload, schedule: StreamSchedule) -> LaunchShape:
        shape = super().launch_shape(workload, schedule)
        return dataclasses.replace(shape, kernels=shape.kernels + 1)  # XLA reduces the candidates

    def writing(self, schedule: StreamSchedule) -> Any:
        return schedule.blocks, schedule.tile_rows

    def outputs(self, workload: Workload, schedule: StreamSchedule) -> tuple[tuple[int, ...], ...]:
        """Values and tokens of the candidates; the op's [M] result is XLA's reduction of them."""
        candidates = (schedule.blocks, self.stream(workload, schedule).columns)
        return candidates, candidates

    def writes(self, workload: Workload, schedule: StreamSchedule) -> Iterator[Writes]:
        columns = self.stream(workload, schedule).columns
        for block in range(schedule.blocks):
            for output in range(2):
                yield Writes(output, (candidate_row(block), 0), (1, columns))

    def build(self, workload: Workload, schedule: StreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        greedy = workload.option("greedy", False)
        candidates = (schedule.blocks, stream.columns)

        def body(*refs: Any, **scratch: Any) -> None:
            _SampleBody(workload, schedule, stream, greedy, refs, scratch).run()

        scratch_types = stream.scratch() | {
            "best_s": plgpu.SMEM((MMA_ROWS, stream.columns), f32),
            "token_s": plgpu.SMEM((MMA_ROWS, stream.columns), jnp.int32),
            "temperature_s": plgpu.SMEM((stream.columns,), f32),
            "seed_s": plgpu.SMEM((stream.columns,), jnp.uint32),
            "position_s": plgpu.SMEM((stream.columns,), jnp.int32),
            "rows_ready": plgpu.Barrier(num_arrivals=3),
            "value_out_s": plgpu.SMEM((stream.columns,), f32),
            "token_out_s": plgpu.SMEM((stream.columns,), jnp.int32),
        }
        kernel = plgpu.kernel(
            body,
            out_type=(
                jax.ShapeDtypeStruct(candidates, f32),
                jax.ShapeDtypeStruct(candidates, jnp.int32),
            ),
            scratch_types=scratch_types,
            kernel_name="lm_head_sample_stream",
            **stream.launch(),
        )

        stream_sample = with_norm(kernel, schedule, workload.option("eps"))

        def sample(
            x: Any, norm: Any, w: Any, temperature: Any, seeds: Any, positions: Any
        ) -> jax.Array:
            row = () if greedy else (temperature, seeds.astype(jnp.uint32), positions)
            values, tokens = stream_sample(x, norm, w, *row)
            best = jnp.max(values, axis=0, keepdims=True)
            token = jnp.min(jnp.where(values == best, tokens, NO_TOKEN), axis=0)
            return token[: workload["M"]]

        return sample


def candidate_row(block: Any) -> Any:
    """Row of a block's candidates: the write map and the body's stores."""
    return block


@dataclasses.dataclass
class _SampleBody:
    """One block's program around the weight stream."""

    workload: Workload
    schedule: StreamSchedule
    stream: Stream
    greedy: bool
    refs: tuple[Any, ...]
    scratch: dict[str, Any]

    def run(self) -> None:
        x_g, *rest = self.refs
        norm_g = None if self.schedule.separate_norm else rest.pop(0)
        self.w_g, *self.rows_g, self.values_g, self.tokens_g = rest
        eps = self.workload.option("eps")
        self.stream.run(
            x_g, self.load, self.epilogue, self.scratch, norm_g, eps, after_wait=self.prepare
        )
        self.store()

    def load(self, tile: Any, k: Any, destination: Any, barrier: Any) -> None:
        load_rows(self.w_g, tile, k, destination, barrier)

    def prepare(self) -> None:
        """Clears the best tokens and spreads the rows' sampling parameters over the columns."""
        shape = (MMA_ROWS, self.stream.columns)
        lowest = plgpu.layout_cast(jnp.full(shape, -jnp.inf, f32), ACCUMULATOR)
        none = plgpu.layout_cast(jnp.full(shape, NO_TOKEN, jnp.int32), ACCUMULATOR)
        self.scratch["best_s"][...] = lowest
        self.scratch["token_s"][...] = none
        if self.greedy:
            return
        temperature, seeds, positions = self.load_rows()
        first, second = row_keys(seeds, positions)
        hot = temperature > 0.0
        inverse = jnp.where(hot, 1.0 / jnp.where(hot, temperature, 1.0), 1.0)
        noise = jnp.where(hot, 1.0, 0.0)
        spread = lambda v: jax.lax.broadcast_in_dim(v, shape, (1,))  # noqa: E731
        self.first, self.second = spread(first), spread(second)
        self.inverse, self.noise = spread(inverse), spread(noise)

    def load_rows(self) -> list[jax.Array]:
        """Temperature, seed and position of each row as [columns]; of padding columns zero."""
        names = ("temperature_s", "seed_s", "position_s")
        for ref, name in zip(self.rows_g, names, strict=True):
            source = ref.at[pl.ds(0, self.stream.columns)]  # what lies past the rows reads as zero
            plgpu.copy_gmem_to_smem(source, self.scratch[name], self.scratch["rows_ready"])
        plgpu.barrier_wait(self.scratch["rows_ready"])
        return [
            plgpu.load(self.scratch[name], layout=PER_COLUMN, optimized=False) for name in names
        ]

    def epilogue(self, tile: Any, sums: list[jax.Array]) -> None:
        for i, logits in enumerate(sums):
            self.keep_best(tile * self.stream.groups + i, logits)

    def keep_best(self, part: Any, logits: jax.Array) -> None:
        """Merges the scores of 64 tokens into the block's best."""
        shape = (MMA_ROWS, self.stream.columns)
        scores = capped(logits, self.workload.option("soft_cap", 0.0))
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ACCUMULATOR) + part * MMA_ROWS
        if not self.greedy:
            scores = scores * self.inverse
            scores = scores + gumbel_of(self.first, self.second, token) * self.noise
        best_s, token_s = self.scratch["best_s"], self.scratch["token_s"]
        best = plgpu.load(best_s, layout=ACCUMULATOR, optimized=False)
        better = scores > best  # strictly: of equal scores the earlier tile's lower id stays
        if self.workload["V"] % MMA_ROWS:
            better = jnp.logical_and(better, token < self.workload["V"])
        held = plgpu.load(token_s, layout=ACCUMULATOR, optimized=False)
        best_s[...] = jnp.where(better, scores, best)
        token_s[...] = jnp.where(better, token, held)

    def store(self) -> None:
        best = plgpu.load(self.scratch["best_s"], layout=ACCUMULATOR, optimized=False)
        token = plgpu.load(self.scratch["token_s"], layout=ACCUMULATOR, optimized=False)
        top = jnp.max(best, axis=0)
        tied = best == jax.lax.broadcast_in_dim(top, best.shape, (1,))
        row = candidate_row(jax.lax.axis_index("block"))
        self.scratch["value_out_s"][...] = top
        self.scratch["token_out_s"][...] = jnp.min(jnp.where(tied, token, NO_TOKEN), axis=0)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.scratch["value_out_s"], self.values_g.at[row])
        plgpu.copy_smem_to_gmem(self.scratch["token_out_s"], self.tokens_g.at[row])
        plgpu.wait_smem_to_gmem(0)


STREAM = StreamSample("mosaic_gpu.lm_head_sample.stream", LM_HEAD_SAMPLE)
