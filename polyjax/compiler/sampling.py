"""Choosing tokens on the device: penalties, filters, masks, Gumbel noise, log-probabilities.

Filters find their threshold by bisection over the bits of the values, never by sorting the
vocabulary: 31 passes over [B,V] instead of a sort, and the same result wherever it runs. Ties with
the last value kept are kept, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.batch_layout import SAMPLES, SAMPLING_FLOATS, SAMPLING_INTS, PackedBatch
from polyjax.core.noise import gumbel

MAX_TOP_LOGPROBS = 20
SCORE_COLUMNS = 2 + 2 * MAX_TOP_LOGPROBS
"""Columns of `scores`: log-probability bits, rank, top ids, top log-probability bits."""

f32 = jnp.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What the full sampler keeps per slot, S = slots + 1 (the last is the sink of inactive rows).

    output_counts [S,V] int32: how often a token was generated. prompt_seen [S,V] bool. bias_ids
    [S,J] int32 and bias_values [S,J] float32: logit_bias, unused entries add 0 to token 0.
    """

    output_counts: Any  # arrays of the device or the host, avals, shardings
    prompt_seen: Any
    bias_ids: Any
    bias_values: Any


@dataclasses.dataclass(frozen=True)
class RowParams:
    """A launch's sampling parameters, each [B]; `samples` says which rows sample at all."""

    slots: jax.Array
    samples: jax.Array
    positions: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    top_k: jax.Array
    seeds: jax.Array


def row_params(batch: PackedBatch) -> RowParams:
    """The sampling parameters of a packed batch, decoded. `positions` are of the sampled tokens."""
    floats = jax.lax.bitcast_convert_type(batch.sampling_floats, f32)
    return RowParams(
        slots=batch.slots,
        samples=(batch.flags & SAMPLES) != 0,
        positions=batch.context_lens,
        seeds=jax.lax.bitcast_convert_type(
            batch.sampling_ints[:, SAMPLING_INTS.index("seed")], jnp.uint32
        ),
        top_k=batch.sampling_ints[:, SAMPLING_INTS.index("top_k")],
        **{name: floats[:, column] for column, name in enumerate(SAMPLING_FLOATS)},
    )


def store_tokens(last_tokens: jax.Array, tokens: jax.Array, rows: RowParams) -> jax.Array:
    """last_tokens [S] with the sampling rows' new tokens [B]; the others write to the sink."""
    sink = last_tokens.shape[0] - 1
    return last_tokens.at[jnp.where(rows.samples, rows.slots, sink)].set(tokens)


def sample_full(
    logits: jax.Array, state: SamplingState, rows: RowParams, mask: jax.Array
) -> tuple[jax.Array, SamplingState]:
    """Samples with everything a request may ask for. Returns (tokens [B] int32, updated counts).

    logits [B,V] float32, mask [B,ceil(V/32)] int32, bit v%32 of word v//32 allows token v. The
    order is: penalties, bias, mask, temperature, min_p, top_k, top_p, noise. A row without a
    temperature takes the best token before it. Noise depends only on a row's seed and position.
    """
    seen, counts = state.prompt_seen[rows.slots], state.output_counts[rows.slots]
    logits = penalise(logits, counts, seen, rows)
    logits = add_bias(logits, state.bias_ids[rows.slots], state.bias_values[rows.slots])
    logits = jnp.where(unpack_mask(mask, logits.shape[1]), logits, -jnp.inf)
    hot = rows.temperature > 0
    scaled = filter_logits(logits / jnp.where(hot, rows.temperature, 1.0)[:, None], rows)
    noisy = scaled + gumbel(rows.seeds, rows.positions, logits.shape[1])
    tokens = jnp.argmax(jnp.where(hot[:, None], noisy, logits), axis=-1).astype(jnp.int32)
    sink = state.output_counts.shape[0] - 1
    target = jnp.where(rows.samples, rows.slots, sink)
    counted = state.output_counts.at[target, tokens].add(1)
    return tokens, dataclasses.replace(state, output_counts=counted)


def penalise(logits: jax.Array, counts: jax.Array, seen: jax.Array, rows: RowParams) -> jax.Array:
    """Repetition penalty on prompt and output tokens, then frequency and presence on output.

    Repetition: CTRL (Keskar et al. 2019, section 4.1), positive logits divided, others multiplied.
    Frequency and presence: subtracted once per occurrence and once for any, as OpenAI's API says.
    """
    repeated = seen | (counts > 0)
    factor = rows.repetition_penalty[:, None]
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits -= rows.frequency_penalty[:, None] * counts.astype(f32)
    return logits - rows.presence_penalty[:, None] * (counts > 0).astype(f32)


def add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """logits [B,V] plus values [B,J] at token ids [B,J]; an id that repeats adds up."""
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(values)


def unpack_mask(mask: jax.Array, vocab: int) -> jax.Array:
    """mask [B,ceil(V/32)] int32 -> [B,V] bool."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab] != 0


def filter_logits(logits: jax.Array, rows: RowParams) -> jax.Array:
    """logits [B,V] with the tokens that min_p, top_k and top_p exclude at -inf.

    min_p keeps probabilities of at least min_p times the largest; top_k the k best; top_p then the
    fewest best tokens whose probabilities, renormalised over what is left, reach top_p.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - best)  # proportional to probabilities, the largest is 1
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    vocab = logits.shape[1]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    kth = _threshold(weights, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= k)
    weights = jnp.where(weights >= kth[:, None], weights, 0.0)
    wanted = rows.top_p * jnp.sum(weights, axis=-1)
    nucleus = _threshold(
        weights, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= wanted
    )
    lowest = jnp.where(rows.top_p < 1.0, nucleus, 0.0)[:, None]
    return jnp.where((weights >= lowest) & (weights > 0.0), logits, -jnp.inf)


def _threshold(weights: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """[B]: the largest float t such that `enough(weights >= t)` holds per row, 0 if none does.

    Bits of non-negative floats order like the floats, so t is found bit by bit.
    """

    def try_bit(index: jax.Array, bits: jax.Array) -> jax.Array:
        tried = bits | (jnp.int32(1) << (30 - index))
        kept = weights >= jax.lax.bitcast_convert_type(tried, f32)[:, None]
        return jnp.where(enough(kept), tried, bits)

    start = jnp.zeros(weights.shape[0], jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, try_bit, start), f32)


def scores(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probability and rank of `targets` [M] and the best tokens of each row, as one array.

    logits [M,V] float32, -inf where a grammar excludes a token and else as the model made them ->
    int32 [M,SCORE_COLUMNS], floats as their bits, so that one transfer brings it to the host. Rank
    0 is the best token.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)
    rank = jnp.sum(logprobs > own, axis=-1, keepdims=True, dtype=jnp.int32)
    top, ids = jax.lax.top_k(logprobs, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    missing = ((0, 0), (0, MAX_TOP_LOGPROBS - top.shape[1]))  # a tiny vocabulary
    top, ids = jnp.pad(top, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)  # noqa: E731
    return jnp.concatenate([bits(own), rank, ids, bits(top)], axis=-1)


def set_slot(state: SamplingState, slot: jax.Array, row: SamplingState) -> SamplingState:
    """`state` with one slot's row replaced: what a newly admitted sequence starts from."""
    return jax.tree.map(lambda whole, part: whole.at[slot].set(part), state, row)
