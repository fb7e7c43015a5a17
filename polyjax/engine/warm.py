"""First calls of a program, on scratch: every row inactive, nothing written but the sink."""

from __future__ import annotations

import jax
import numpy as np

from polyjax.compiler.program import Kind, StepProgram
from polyjax.compiler.sampling import SamplingState
from polyjax.core.batch_layout import BatchLayout
from polyjax.engine.state import DeviceState


def warm(program: StepProgram, state: DeviceState, calls: int) -> None:
    """Calls `program` so often that later calls find everything built; waits for each."""
    for _ in range(calls):
        jax.block_until_ready(_call_inactive(program, state))


def _call_inactive(program: StepProgram, state: DeviceState) -> object:
    key, spec = program.key, state.spec
    layout = BatchLayout(key.bucket, len(spec.config.kv_groups()))
    flat = np.zeros(layout.size, np.int32)
    layout.split(flat).slots[:] = spec.num_slots
    rows = max(key.bucket.sequences, key.bucket.tokens)
    hidden = np.zeros((rows, spec.config.embed_dim), np.dtype(spec.dtype))
    match key.kind:
        case Kind.PREFILL:
            state.kv, *outputs = program(state.params, state.kv, state.last_tokens, flat)
        case Kind.DECODE_GREEDY | Kind.DECODE_GUMBEL:
            state.kv, state.last_tokens, *outputs = program(
                state.params, state.kv, state.last_tokens, flat
            )
        case Kind.SAMPLE_GREEDY | Kind.SAMPLE_GUMBEL:
            state.last_tokens, *outputs = program(
                state.head, state.last_tokens, hidden, flat[: layout.sampler_size]
            )
        case Kind.SAMPLE_FULL:
            mask = np.full((rows, spec.mask_words), -1, np.int32)
            state.last_tokens, state.sampling, *outputs = program(
                state.head,
                state.last_tokens,
                state.sampling,
                hidden,
                flat[: layout.sampler_size],
                mask,
            )
        case Kind.SCORE:
            mask = np.full(spec.score_mask_shape(rows), -1, np.int32)
            outputs = [program(state.head, hidden, np.zeros(rows, np.int32), mask)]
        case Kind.ADMIT:
            neutral: SamplingState = jax.tree.map(
                lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), state.sampling
            )
            state.sampling = program(state.sampling, np.int32(spec.num_slots), neutral)
            outputs = [state.sampling.output_counts]
        case Kind.READ_SCRATCH:
            outputs = [program(state.kv)]
        case Kind.COPY_PAGES | Kind.COMPARE_PAGES:
            sinks = np.zeros((len(spec.config.kv_groups()), spec.scratch_pages), np.int32)
            result = program(state.kv, sinks, sinks)
            if key.kind is Kind.COPY_PAGES:
                state.kv = result
            outputs = [result]
    return outputs
