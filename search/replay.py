"""Replays traffic: a plan's programs on packed rows, over pools with known contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyjax.compiler.program import Kind, ProgramKey, StepProgram
from polyjax.compiler.state import StateSpec
from polyjax.core.batch_layout import BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.engine.state import DeviceState
from polyjax.gates.scratch import ScratchRows, ScratchSpace
from search.traffic import Row, Step


@dataclasses.dataclass(frozen=True)
class Call:
    """One launch of a step: its program and packed rows, and the sampler after a prefill."""

    program: StepProgram
    flat: np.ndarray
    sampler: StepProgram | None
    sampler_rows: np.ndarray | None
    rows: tuple[int, ...]


class PlanArm:
    """A plan's programs on replayed traffic; all arms of a bench share one state."""

    def __init__(self, state: DeviceState, calls: Mapping[str, list[list[Call]]]):
        self._state, self.calls = state, calls
        self.groups = tuple(calls)

    def run(self, group: str) -> Any:
        results = [self.launch(call)[1] for step in self.calls[group] for call in step]
        return results, self._state.kv

    def units(self, group: str) -> int:
        return len(self.calls[group])

    def launch(self, call: Call) -> tuple[Any, Any]:
        """Dispatches one launch; returns last hidden states [B,D] and tokens [B]."""
        state = self._state
        if call.sampler is None:
            state.kv, state.last_tokens, tokens, hidden, _ = call.program(
                state.params, state.kv, state.last_tokens, call.flat
            )
            return hidden, tokens
        state.kv, hidden, _ = call.program(state.params, state.kv, state.last_tokens, call.flat)
        state.last_tokens, tokens = call.sampler(
            state.head, state.last_tokens, hidden, call.sampler_rows
        )
        return hidden, tokens


class Packer:
    """Packs traffic rows: what they read lies all over the pool, what they write in scratch."""

    def __init__(self, spec: StateSpec):
        self.spec = spec
        self.space = ScratchSpace(spec)

    def pack(self, inputs: ScratchRows, rows: Sequence[int], bucket: Bucket) -> np.ndarray:
        picked = ScratchRows(
            tuple(inputs.tokens[row] for row in rows),
            inputs.context_lens[list(rows)],
            inputs.seeds[list(rows)],
            inputs.temperatures[list(rows)],
        )
        flat = self.space.pack(picked, bucket)
        batch = BatchLayout(bucket, len(self.space.groups)).split(flat)
        size = self.spec.page_size
        for index in range(len(self.space.groups)):
            usable = self.spec.num_pages[index] - self.spec.scratch_pages - 1
            for place, row in enumerate(rows):
                start = int(picked.context_lens[place]) - len(picked.tokens[place])
                first = int(batch.first_pages[index, place])
                logical = np.arange(first, start // size)
                table = batch.page_tables[index, place]
                table[: len(logical)] = 1 + (row * bucket.pages + logical) % max(usable, 1)
        return flat


def pack_call(
    programs: Mapping[ProgramKey, StepProgram],
    group: str,
    bucket: Bucket,
    rows: Sequence[int],
    inputs: ScratchRows,
    packer: Packer,
) -> Call:
    flat = packer.pack(inputs, rows, bucket)
    if group == "decode":
        program = programs[ProgramKey(Kind.DECODE_GREEDY, bucket)]
        return Call(program, flat, None, None, tuple(rows))
    size = BatchLayout(bucket, len(packer.space.groups)).sampler_size
    sampler = programs[ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, bucket.sequences, 0))]
    program = programs[ProgramKey(Kind.PREFILL, bucket)]
    return Call(program, flat, sampler, flat[:size], tuple(rows))


def row_inputs(spec: StateSpec, step: Step, seed: int) -> ScratchRows:
    """Random tokens for a step's rows, the same whatever buckets they run in."""
    rng = np.random.default_rng(seed)
    vocab = spec.config.vocab_size

    def tokens(row: Row) -> np.ndarray:
        return rng.integers(0, vocab, row.tokens)

    return ScratchRows(
        tuple(tokens(row) for row in step),
        np.array([row.context for row in step]),
        np.zeros(len(step), np.int64),
        np.zeros(len(step), np.float32),
    )


def pool_filler(state: DeviceState, seed: int) -> Callable[[], tuple[jax.Array, ...]]:
    """Compiled: pools whose pages all hold the same random numbers, whichever page is read."""
    rng = np.random.default_rng(seed)
    pages = [rng.standard_normal(pool.shape[1:]).astype(pool.dtype) for pool in state.kv]
    shardings = tuple(pool.sharding for pool in state.kv)
    shapes = [pool.shape for pool in state.kv]

    def fill() -> tuple[jax.Array, ...]:
        pairs = zip(pages, shapes, strict=True)
        return tuple(jnp.broadcast_to(jnp.asarray(page), shape) for page, shape in pairs)

    return jax.jit(fill, out_shardings=shardings).lower().compile()
