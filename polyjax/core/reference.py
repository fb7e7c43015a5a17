"""The plain-jnp meaning of every op. This is the truth that kernels and gates are compared with.

References accumulate in float32 and round once to the dtype of their first array argument;
composites.py has the ops made of others.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

f32 = jnp.float32


def embed(_ops: Any, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table [V,D], tokens [M] -> [M,D]; ids are clipped into the vocabulary."""
    return jnp.take(table, tokens, axis=0, mode="clip")


def rms_norm(_ops: Any, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """x [M,D] / sqrt(mean(x^2) + eps) * weight, computed in float32."""
    xf = x.astype(f32)
    scale = jax.lax.rsqrt(jnp.mean(xf * xf, axis=-1, keepdims=True) + eps)
    return (xf * scale * weight.astype(f32)).astype(x.dtype)


def matmul(
    _ops: Any,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    out_dtype: str | None = None,
) -> jax.Array:
    """x [M,K] @ w[N,K].T (+ bias [N]) (+ residual [M,N]) -> [M,N] in out_dtype, or x's dtype."""
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=f32)
    if bias is not None:
        y = y + bias.astype(f32)
    if residual is not None:
        y = y + residual.astype(f32)
    return y.astype(out_dtype or x.dtype)


def rope(_ops: Any, x: jax.Array, cos_sin: jax.Array) -> jax.Array:
    """Rotates a head's first R dims, half against half. x [M,N,H], cos_sin [M,R] (cos | sin)."""
    rotary = cos_sin.shape[-1]
    cos, sin = jnp.split(cos_sin.astype(f32)[:, None, :], 2, axis=-1)
    x1, x2 = jnp.split(x[..., :rotary].astype(f32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, x[..., rotary:]], axis=-1) if rotary < x.shape[-1] else rotated


def kv_write(_ops: Any, kv: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes k, v [M,K,H] at flat slots [M] of kv [P,2,K,Z,H]; in place if kv is donated."""
    page_size = kv.shape[3]
    new = jnp.stack([k, v], axis=1).astype(kv.dtype)
    kv = kv.at[slots // page_size, :, :, slots % page_size].set(new, mode="promise_in_bounds")
    # Without the barrier XLA on CPU reads the pool in the fusion that writes, and so copies it.
    return jax.lax.optimization_barrier(kv)


def paged_attention(
    _ops: Any,
    q: jax.Array,
    kv: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    first_pages: jax.Array | None = None,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> jax.Array:
    """Causal attention of new tokens over their sequence's pages, this step's own keys included.

    q [B,T,N,H], kv [P,2,K,Z,H], page_table [B,C], context_lens, query_lens [B] -> [B,T,N,H]. Token
    t of row b sits at position context_lens - query_lens + t and sees positions <= its own, and >
    its own - window where window is set. Scores and softmax are float32. Rows and tails without a
    token give 0.
    """
    batch, tokens, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = kv.shape
    keys, values = gathered_pages(kv, page_table, 0), gathered_pages(kv, page_table, 1)
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bksh->bktgs", grouped, keys, preferred_element_type=f32) * scale
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    first = 0 if first_pages is None else first_pages[:, None] * page_size
    slot_positions = first + jnp.arange(keys.shape[2])[None, :]
    mask = causal_mask(slot_positions, context_lens, query_lens, tokens, window)
    weights = masked_softmax(scores, mask[:, None, :, None, :])
    # Unowned slots may hold anything, NaN included, and 0 * NaN is NaN: mask the values too.
    values = jnp.where(jnp.any(mask, axis=1)[:, None, :, None], values, 0)
    out = jnp.einsum(
        "bktgs,bksh->btkgh", weights.astype(kv.dtype), values, preferred_element_type=f32
    )
    return out.reshape(batch, tokens, heads, head_dim).astype(q.dtype)


def gathered_pages(kv: jax.Array, page_table: jax.Array, plane: int) -> jax.Array:
    """One plane of every row's pages: kv [P,planes,K,Z,H], page_table [B,C] -> [B,K,C*Z,H]."""
    pages = kv.at[page_table, plane].get(mode="clip")  # [B,C,K,Z,H]
    batch, _, kv_heads, _, head_dim = pages.shape
    return pages.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)


def causal_mask(
    slot_positions: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    tokens: int,
    window: int = 0,
) -> jax.Array:
    """slot_positions [B|1,S] -> [B,T,S] bool: whether new token t of row b sees slot s."""
    offsets = jnp.arange(tokens)[None, :, None]
    positions = (context_lens - query_lens)[:, None, None] + offsets
    live = offsets < query_lens[:, None, None]
    mask = (slot_positions[:, None, :] <= positions) & live
    return mask & (slot_positions[:, None, :] > positions - window) if window else mask


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis where `mask`; a row that sees nothing gives 0."""
    scores = jnp.where(mask, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated_activation(_ops: Any, gate_up: jax.Array, *, activation: str = "silu") -> jax.Array:
    """gate_up [M,2,F] -> activation(gate) * up [M,F], in float32."""
    gate, up = gate_up[:, 0].astype(f32), gate_up[:, 1].astype(f32)
    return (_ACTIVATIONS[activation](gate) * up).astype(gate_up.dtype)
