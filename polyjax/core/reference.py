"""The plain-jnp meaning of every op. This is the truth that kernels and gates are compared with.

References accumulate in float32 and round once to the dtype of their first array argument.
Composite references call simpler ops through `ops`: a plan may fuse them or leave them in pieces.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.noise import gumbel as gumbel

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


def norm_qkv_rope_write(
    ops: Any,
    x: jax.Array,
    norm: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cos_sin: jax.Array | None,
    kv: jax.Array,
    slots: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """The attention input: RMSNorm, fused QKV projection, optional qk-norm, RoPE, paged KV write.

    x [M,D], w [K,G+2,H,D] (per kv head: G query heads, key, value) -> q [M,K*G,H], the pool.
    """
    from polyjax.core import ops as declared  # composite references name simpler ops declared there

    kv_heads, group, head_dim, embed_dim = w.shape
    rows = x.shape[0]
    y = ops(declared.RMS_NORM, x, norm, eps=eps)
    flat_bias = None if bias is None else bias.reshape(-1)
    y = ops(declared.MATMUL, y, w.reshape(-1, embed_dim), flat_bias, None)
    y = y.reshape(rows, kv_heads, group, head_dim)
    q = y[:, :, : group - 2].reshape(rows, -1, head_dim)
    k, v = y[:, :, group - 2], y[:, :, group - 1]
    if q_norm is not None:
        q = ops(declared.RMS_NORM, q.reshape(-1, head_dim), q_norm, eps=eps).reshape(q.shape)
    if k_norm is not None:
        k = ops(declared.RMS_NORM, k.reshape(-1, head_dim), k_norm, eps=eps).reshape(k.shape)
    if cos_sin is not None:
        q, k = ops(declared.ROPE, q, cos_sin), ops(declared.ROPE, k, cos_sin)
    return q, ops(declared.KV_WRITE, kv, k, v, slots)


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


def norm_gate_up(
    ops: Any, x: jax.Array, norm: jax.Array, w: jax.Array, *, eps: float, activation: str = "silu"
) -> jax.Array:
    """RMSNorm, gate and up projections, gated activation. x [M,D], w [2,F,D] -> [M,F]."""
    from polyjax.core import ops as declared

    def unflattened(_ops: Any, y: jax.Array, *_: Any) -> jax.Array:
        """[M,2,F]. Flattening a w whose F is spread over devices would gather it onto each.

        With w as the first operand nobody transposes it: XLA on CPU would copy it every step.
        """
        y = jax.lax.dot_general(w, y, (((2,), (1,)), ((), ())), preferred_element_type=f32)
        return y.transpose(2, 0, 1).astype(x.dtype)

    y = ops(declared.RMS_NORM, x, norm, eps=eps)
    flat = w.reshape(-1, w.shape[-1])
    y = ops(declared.MATMUL, y, flat, None, None, reference=unflattened)
    return ops(
        declared.GATED_ACTIVATION, y.reshape(x.shape[0], 2, w.shape[1]), activation=activation
    )


def lm_head(
    ops: Any, x: jax.Array, norm: jax.Array, w: jax.Array, *, eps: float, soft_cap: float = 0.0
) -> jax.Array:
    """Final RMSNorm and vocabulary projection. x [M,D], w [V,D] -> float32 logits [M,V]."""
    from polyjax.core import ops as declared

    y = ops(declared.RMS_NORM, x, norm, eps=eps)
    logits = ops(declared.MATMUL, y, w, None, None, out_dtype="float32")
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def lm_head_sample(
    ops: Any,
    x: jax.Array,
    norm: jax.Array,
    w: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    eps: float,
    soft_cap: float = 0.0,
    greedy: bool = False,
) -> jax.Array:
    """Samples a token per row without keeping the logits. Returns int32 [M].

    temperature [M] f32 (0: greedy), seeds [M] uint32, positions [M] int32 of the sampled token.
    With `greedy` every row is greedy and no noise is drawn. Ties go to the lowest id.
    """
    from polyjax.core import ops as declared

    logits = ops(declared.LM_HEAD, x, norm, w, eps=eps, soft_cap=soft_cap)
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    hot = temperature > 0
    scaled = logits / jnp.where(hot, temperature, 1.0)[:, None]
    noise = gumbel(seeds, positions, logits.shape[-1])
    return jnp.argmax(jnp.where(hot[:, None], scaled + noise, logits), axis=-1).astype(jnp.int32)


def dense_decode_stack(
    ops: Any,
    x: jax.Array,
    attn_norm: tuple[jax.Array, ...],
    qkv: tuple[jax.Array, ...],
    o: tuple[jax.Array, ...],
    mlp_norm: tuple[jax.Array, ...],
    gate_up: tuple[jax.Array, ...],
    down: tuple[jax.Array, ...],
    kv: tuple[jax.Array, ...],
    cos_sin: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    *,
    eps: float,
    scale: float,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """All layers of a dense pre-norm SwiGLU transformer for one new token a row.

    x [B,D] is the embedded token. Per layer: attn_norm, mlp_norm [D], qkv [K,G,H,D] (a kv head's
    G-2 query heads, its key, its value), o [D,N] with N = K*(G-2)*H, gate_up [2,F,D], down [D,F],
    pool kv [P,2,K,Z,H]. context_lens [B] counts the new token, which sits at position
    context_lens - 1; 0 marks an inactive row (written to slot 0, its x is meaningless). Returns the
    residual stream [B,D] before the final norm and the pools.
    """
    from polyjax.core import ops as declared

    rows = jnp.arange(x.shape[0])
    live = context_lens > 0
    position = jnp.maximum(context_lens - 1, 0)
    page_size = kv[0].shape[3]
    slots = page_table[rows, position // page_size] * page_size + position % page_size
    slots = jnp.where(live, slots, 0)
    pools = []
    layers = zip(attn_norm, qkv, o, mlp_norm, gate_up, down, kv, strict=True)
    for norm, w_qkv, w_o, norm2, w_gate_up, w_down, pool in layers:
        q, pool = ops(
            declared.NORM_QKV_ROPE_WRITE,
            x, norm, w_qkv, None, None, None, cos_sin, pool, slots,
            eps=eps,
        )  # fmt: skip
        heads = ops(
            declared.PAGED_ATTENTION,
            q[:, None], pool, page_table, context_lens, live.astype(jnp.int32), None,
            scale=scale,
        )  # fmt: skip
        x = ops(declared.MATMUL, heads.reshape(x.shape[0], -1), w_o, None, x)
        h = ops(declared.NORM_GATE_UP, x, norm2, w_gate_up, eps=eps)
        x = ops(declared.MATMUL, h, w_down, None, x)
        pools.append(pool)
    return x, tuple(pools)


def dense_decode_greedy(
    ops: Any, *args: Any, eps: float, scale: float
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """`dense_decode_stack`, final norm [D], LM head [V,D] and arg-max.

    Takes the stack's arguments, then final_norm [D] and head [V,D]. Returns (tokens int32 [B],
    residual stream [B,D], pools). Ties go to the lowest id.
    """
    from polyjax.core import ops as declared

    *stack, final_norm, head = args
    x, pools = ops(declared.DENSE_DECODE_STACK, *stack, eps=eps, scale=scale)
    rows = x.shape[0]
    cold, seeds = jnp.zeros((rows,), f32), jnp.zeros((rows,), jnp.uint32)
    positions = jnp.zeros((rows,), jnp.int32)
    tokens = ops(
        declared.LM_HEAD_SAMPLE, x, final_norm, head, cold, seeds, positions, eps=eps, greedy=True
    )
    return tokens, x, pools
