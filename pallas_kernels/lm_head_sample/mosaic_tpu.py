"""LM head that samples: a weight stream whose tiles leave only the best token of each lane.

A row's scores of one tile are folded lane by lane into the best score and token met so far; the
noise of a token is drawn where its logit is. Each core leaves [rows, 128] candidates, and the last
comparison among them is XLA's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.base import clipped
from pallas_kernels.lm_head.mosaic_tpu import capped
from pallas_kernels.tpu_base import LANES, f32, i32, vmem_bytes
from pallas_kernels.tpu_stream import (
    Epilogue,
    Position,
    Stream,
    TpuStreamKernel,
    TpuStreamSchedule,
    unsupported,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.noise import gumbel_of, row_keys
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import LM_HEAD_SAMPLE

NO_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class StreamSample(TpuStreamKernel):
    def supports(self, workload: Workload) -> str | None:
        return unsupported(workload, workload["D"], "x", "norm", "w")

    def illegal(
        self, workload: Workload, schedule: TpuStreamSchedule, chip: ChipSpec
    ) -> str | None:
        stream = self.stream(workload, schedule)
        if stream.tile_n % LANES:
            return f"tiles of {stream.tile_n} tokens are no multiple of {LANES} lanes"
        return stream.illegal(chip)

    def stream(self, workload: Workload, schedule: TpuStreamSchedule) -> Stream:
        return Stream(workload["M"], 1, workload["V"], workload["D"], schedule, normalised=True)

    def extra_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        """Candidates, the rows' parameters, and the noise of one tile."""
        stream = self.stream(workload, schedule)
        lanes = vmem_bytes(stream.tile_m, LANES, dtype=f32)
        return 16 * lanes + 2 * vmem_bytes(stream.tile_m, stream.tile_n, dtype=f32)

    def outputs(
        self, workload: Workload, schedule: TpuStreamSchedule
    ) -> tuple[tuple[int, ...], ...]:
        """Best scores and tokens of every core and lane."""
        return ((schedule.cores, workload["M"], LANES),) * 2

    def writes(self, workload: Workload, schedule: TpuStreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        shape = schedule.cores, stream.rows, LANES
        for i in range(stream.grid[1]):
            for core in range(schedule.cores):
                start = core, i * stream.tile_m, 0
                for output in range(2):
                    yield clipped(shape, start, (1, stream.tile_m, LANES), output)

    def build(self, workload: Workload, schedule: TpuStreamSchedule) -> Callable[..., Any]:
        stream = self.stream(workload, schedule)
        greedy, soft_cap = workload.option("greedy", False), workload.option("soft_cap", 0.0)
        vocabulary = workload["V"]

        def body(rows: Sequence[Any], outputs: Sequence[Any], scratch: Sequence[Any]) -> Epilogue:
            values_ref, tokens_ref = outputs
            best_ref, token_ref = scratch

            def epilogue(where: Position, sums: list[jax.Array]) -> None:
                @pl.when(where.first)
                def _clear() -> None:
                    best_ref[...] = jnp.full(best_ref.shape, -jnp.inf, f32)
                    token_ref[...] = jnp.full(token_ref.shape, NO_TOKEN, i32)

                scores = capped(sums[0], soft_cap)
                score_of = _scorer(rows, greedy)
                lane = jax.lax.broadcasted_iota(i32, best_ref.shape, 1)
                best, held = best_ref[...], token_ref[...]
                for start in range(0, stream.tile_n, LANES):
                    token = where.tile * stream.tile_n + start + lane
                    score = score_of(scores[:, start : start + LANES], token)
                    # Strictly: of equal scores the lower id, which came earlier, stays.
                    better = jnp.logical_and(score > best, token < vocabulary)
                    best, held = jnp.where(better, score, best), jnp.where(better, token, held)
                best_ref[...], token_ref[...] = best, held

                @pl.when(where.last)
                def _store() -> None:
                    values_ref[0], tokens_ref[0] = best, held

            return epilogue

        parameters = [] if greedy else [stream.row_spec(1)] * 4
        candidates = pl.BlockSpec((1, stream.tile_m, LANES), lambda c, i, t, k: (c, i, 0))
        shape = (schedule.cores, stream.rows, LANES)
        call = stream.call(
            body,
            self.stream_params(workload, schedule),
            "lm_head_sample",
            parameters,
            [candidates, candidates],
            [jax.ShapeDtypeStruct(shape, f32), jax.ShapeDtypeStruct(shape, i32)],
            scratch=[pltpu.VMEM((stream.tile_m, LANES), dtype) for dtype in (f32, i32)],
            eps=workload.option("eps"),
        )

        def sample(
            x: Any, norm: Any, w: Any, temperature: Any, seeds: Any, positions: Any
        ) -> jax.Array:
            rows = [] if greedy else _row_parameters(temperature, seeds, positions)
            values, tokens = call(x, norm[None], w[None], *rows)
            best = jnp.max(values, axis=(0, 2), keepdims=True)
            return jnp.min(jnp.where(values == best, tokens, NO_TOKEN), axis=(0, 2))

        return sample


def _row_parameters(temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> list[Any]:
    """What a row's scores need, each [M,1]: 1/temperature, 1 where noise is drawn, two keys."""
    hot = temperature > 0
    inverse = jnp.where(hot, 1.0 / jnp.where(hot, temperature, 1.0), 1.0)
    keys = [jax.lax.bitcast_convert_type(key, i32) for key in row_keys(seeds, positions)]
    return [array[:, None] for array in (inverse, hot.astype(f32), *keys)]


def _scorer(rows: Sequence[Any], greedy: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The score of logits [rows, 128] of tokens: themselves, or tempered with noise."""
    if greedy:
        return lambda logits, _: logits
    inverse, hot, *keys = (ref[...] for ref in rows)
    first, second = (jax.lax.bitcast_convert_type(key, jnp.uint32) for key in keys)
    return lambda logits, token: logits * inverse + gumbel_of(first, second, token) * hot


STREAM = StreamSample("mosaic_tpu.lm_head_sample.stream", LM_HEAD_SAMPLE)
