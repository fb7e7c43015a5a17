"""The plain-jnp meaning of mixture-of-experts ops; reference.py has the rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.reference import f32, gated_activation

MAX_EXPERT_ROWS = 64  # rows of one expert multiplied at a time; more gains nothing on a CPU


def route(
    _ops: Any,
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    *,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    kept_groups: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Chooses each token's experts. x [M,D], router [E,D] -> (ids [M,A] int32, weights [M,A] f32).

    Scores are the softmax or sigmoid (`scoring`) of the float32 logits. `bias` [E] is added for
    choosing only. With `groups` the experts are chosen within the `kept_groups` groups whose two
    best scores have the largest sum (DeepSeek-V3 report, section 2.1.2). `normalize` makes the
    weights of a token sum to one before `scale`. Ties go to the lowest id.
    """
    logits = jax.lax.dot_general(
        x.astype(f32), router.astype(f32), (((1,), (1,)), ((), ())), preferred_element_type=f32
    )
    scores = jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)
    choosing = scores if bias is None else scores + bias.astype(f32)
    if groups > 1:
        grouped = choosing.reshape(x.shape[0], groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(axis=-1), kept_groups)[1]
        kept = jnp.any(best[:, :, None] == jnp.arange(groups), axis=1)
        choosing = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choosing.shape)
    ids = jax.lax.top_k(choosing, top_k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * scale


def experts(
    ops: Any,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: str = "silu",
) -> jax.Array:
    """Sum over a token's experts of weight * down(activation(gate x) * up x).

    x [M,D], ids, weights [M,A], gate_up [E,2,F,D], down [E,D,F] -> float32 [M,D]. An id outside
    0..E-1 contributes nothing (it belongs to another device). Only weights of chosen experts are
    read: the (token, expert) pairs are sorted by expert and cut into blocks of one expert's rows.
    """
    num_experts, choices = gate_up.shape[0], ids.shape[1]
    pairs = ids.size
    rows = min(MAX_EXPERT_ROWS, 1 << max(0, (-(-pairs // num_experts) - 1).bit_length()))
    owned = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    order = jnp.argsort(owned, stable=True)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[owned].add(1)[:num_experts]
    firsts = jnp.cumsum(counts) - counts
    last_blocks = jnp.cumsum(-(-counts // rows))
    flat_gate_up = gate_up.reshape(num_experts, -1, x.shape[1])
    pair_weights = weights.reshape(-1).astype(f32)

    def add_block(block: jax.Array, total: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_blocks, block, side="right")
        offset = (block - last_blocks[expert] - (-counts[expert] // rows)) * rows
        position = offset + jnp.arange(rows)
        pair = order[jnp.minimum(firsts[expert] + position, pairs - 1)]
        token = pair // choices
        w_in = jax.lax.dynamic_index_in_dim(flat_gate_up, expert, keepdims=False)
        w_out = jax.lax.dynamic_index_in_dim(down, expert, keepdims=False)
        hidden = jnp.einsum("md,nd->mn", x[token], w_in, preferred_element_type=f32)
        hidden = hidden.astype(x.dtype).reshape(rows, 2, -1)
        hidden = gated_activation(ops, hidden, activation=activation)
        y = jnp.einsum("mf,df->md", hidden, w_out, preferred_element_type=f32)
        weight = jnp.where(position < counts[expert], pair_weights[pair], 0.0)
        return total.at[token].add(weight[:, None] * y)

    return jax.lax.fori_loop(0, last_blocks[-1], add_block, jnp.zeros(x.shape, f32))
