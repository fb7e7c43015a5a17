"""Paged attention with online softmax over chunks of pages, splits merged by log-sum-exp."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.core.reference import causal_mask, gathered_pages
from polyjax.gates.small_workloads import small_workload

OP = ops.PAGED_ATTENTION

WORKLOADS = [
    small_workload("paged_attention"),
    small_workload("paged_attention", "float32"),
    small_workload("paged_attention", optional=("first_pages",), window=6),
    small_workload("paged_attention", soft_cap=20.0),
]
# Pages a chunk, splits of the context, whether weights are rounded to the cache's dtype.
SCHEDULES = [(1, 1, False), (1, 2, True), (2, 1, True), (2, 3, False), (5, 1, True), (3, 2, True)]
MASKED = -1e30
SUBSET = False


def build(workload, schedule):
    pages, splits, narrow = schedule
    scale, cap = workload.option("scale"), workload.option("soft_cap", 0.0)
    window, page = workload.option("window", 0), workload["Z"]

    def attention(q, kv, table, contexts, queries, first_pages=None):
        batch, tokens, _heads, width = q.shape
        grouped = q.astype(jnp.float32).reshape(batch, tokens, kv.shape[2], -1, width)
        keys, values = (gathered_pages(kv.astype(jnp.float32), table, p) for p in (0, 1))
        first = 0 if first_pages is None else first_pages[:, None] * page
        slots = first + jnp.arange(keys.shape[2])[None]
        mask = causal_mask(slots, contexts, queries, tokens, window)
        values = jnp.where(mask.any(1)[:, None, :, None], values, 0.0)
        chunk = pages * page
        chunks = -(-keys.shape[2] // (chunk * splits)) * splits
        extra = chunks * chunk - keys.shape[2]
        keys, values = (jnp.pad(a, ((0, 0), (0, 0), (0, extra), (0, 0))) for a in (keys, values))
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, extra)))[:, None, :, None]

        def part(index):
            """Unnormalised output, maximum and sum of one chunk."""
            cut = lambda a, axis: jax.lax.dynamic_slice_in_dim(a, index * chunk, chunk, axis)  # noqa: E731
            scores = jnp.einsum("btkgh,bksh->bktgs", grouped, cut(keys, 2)) * scale
            scores = cap * jnp.tanh(scores / cap) if cap else scores
            shown = cut(mask, 4)
            scores = jnp.where(shown, scores, MASKED)
            peak = scores.max(-1, keepdims=True)
            weights = jnp.where(shown, jnp.exp2((scores - peak) * 1.4426950408889634), 0.0)
            total = weights.sum(-1, keepdims=True)
            if narrow:
                weights = weights.astype(workload.dtype("kv")).astype(jnp.float32)
            return jnp.einsum("bktgs,bksh->bktgh", weights, cut(values, 2)), peak, total

        def split(number):
            """Chunks number, number + splits, ... one after the other."""
            step = lambda n, state: merged(state, part(number + n * splits))  # noqa: E731
            return jax.lax.fori_loop(1, chunks // splits, step, part(number))

        state = split(0)
        for number in range(1, splits):
            state = merged(state, split(number))
        out, _, total = state
        out = out / jnp.where(total == 0, 1.0, total)
        return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)

    return attention


def merged(a, b):
    (out_a, peak_a, total_a), (out_b, peak_b, total_b) = a, b
    peak = jnp.maximum(peak_a, peak_b)
    left, right = jnp.exp(peak_a - peak), jnp.exp(peak_b - peak)
    return out_a * left + out_b * right, peak, total_a * left + total_b * right
