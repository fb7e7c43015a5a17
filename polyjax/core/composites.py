"""The ops made of simpler ones: each reference calls those through `ops`.

A plan may name a kernel for a composite, which fuses it, or leave it in pieces.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.noise import gumbel
from polyjax.core.op import Op, Workload
from polyjax.core.primitives import (
    GATED_ACTIVATION,
    KV_WRITE,
    MATMUL,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE,
)
from polyjax.core.reference import f32


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
    kv_heads, group, head_dim, embed_dim = w.shape
    rows = x.shape[0]
    y = ops(RMS_NORM, x, norm, eps=eps)
    flat_bias = None if bias is None else bias.reshape(-1)
    y = ops(MATMUL, y, w.reshape(-1, embed_dim), flat_bias, None)
    y = y.reshape(rows, kv_heads, group, head_dim)
    q = y[:, :, : group - 2].reshape(rows, -1, head_dim)
    k, v = y[:, :, group - 2], y[:, :, group - 1]
    if q_norm is not None:
        q = ops(RMS_NORM, q.reshape(-1, head_dim), q_norm, eps=eps).reshape(q.shape)
    if k_norm is not None:
        k = ops(RMS_NORM, k.reshape(-1, head_dim), k_norm, eps=eps).reshape(k.shape)
    if cos_sin is not None:
        q, k = ops(ROPE, q, cos_sin), ops(ROPE, k, cos_sin)
    return q, ops(KV_WRITE, kv, k, v, slots)


NORM_QKV_ROPE_WRITE = Op(
    "norm_qkv_rope_write",
    (
        "x[M,D]",
        "norm[D]",
        "w[K,C,H,D]",
        "bias?[K,C,H]",
        "q_norm?[H]",
        "k_norm?[H]",
        "cos_sin?[M,R]",
        "kv[P,2,K,Z,H]",
        "slots[M]",
    ),
    norm_qkv_rope_write,
    lambda w: 2.0 * w["M"] * w["K"] * w["C"] * w["H"] * w["D"],
    lambda w: (
        w.dtype("w").itemsize * (w["K"] * w["C"] * w["H"] * (w["D"] + w["M"]) + w["M"] * w["D"])
    ),
)


def norm_gate_up(
    ops: Any, x: jax.Array, norm: jax.Array, w: jax.Array, *, eps: float, activation: str = "silu"
) -> jax.Array:
    """RMSNorm, gate and up projections, gated activation. x [M,D], w [2,F,D] -> [M,F]."""

    def unflattened(_ops: Any, y: jax.Array, *_: Any) -> jax.Array:
        """[M,2,F]. Flattening a w whose F is spread over devices would gather it onto each.

        With w as the first operand nobody transposes it: XLA on CPU would copy it every step.
        """
        y = jax.lax.dot_general(w, y, (((2,), (1,)), ((), ())), preferred_element_type=f32)
        return y.transpose(2, 0, 1).astype(x.dtype)

    y = ops(RMS_NORM, x, norm, eps=eps)
    flat = w.reshape(-1, w.shape[-1])
    y = ops(MATMUL, y, flat, None, None, reference=unflattened)
    return ops(GATED_ACTIVATION, y.reshape(x.shape[0], 2, w.shape[1]), activation=activation)


NORM_GATE_UP = Op(
    "norm_gate_up",
    ("x[M,D]", "norm[D]", "w[2,F,D]"),
    norm_gate_up,
    lambda w: 4.0 * w["M"] * w["F"] * w["D"],
    lambda w: w.dtype("w").itemsize * (2 * w["F"] * w["D"] + w["M"] * (w["F"] + w["D"])),
)


def lm_head(
    ops: Any, x: jax.Array, norm: jax.Array, w: jax.Array, *, eps: float, soft_cap: float = 0.0
) -> jax.Array:
    """Final RMSNorm and vocabulary projection. x [M,D], w [V,D] -> float32 logits [M,V]."""
    y = ops(RMS_NORM, x, norm, eps=eps)
    logits = ops(MATMUL, y, w, None, None, out_dtype="float32")
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
    logits = ops(LM_HEAD, x, norm, w, eps=eps, soft_cap=soft_cap)
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    hot = temperature > 0
    scaled = logits / jnp.where(hot, temperature, 1.0)[:, None]
    noise = gumbel(seeds, positions, logits.shape[-1])
    return jnp.argmax(jnp.where(hot[:, None], scaled + noise, logits), axis=-1).astype(jnp.int32)


def _head_bytes(w: Workload) -> float:
    return w.dtype("w").itemsize * (w["V"] * w["D"] + w["M"] * w["D"])


LM_HEAD = Op(
    "lm_head",
    ("x[M,D]", "norm[D]", "w[V,D]"),
    lm_head,
    lambda w: 2.0 * w["M"] * w["V"] * w["D"],
    lambda w: _head_bytes(w) + 4.0 * w["M"] * w["V"],
)
LM_HEAD_SAMPLE = Op(
    "lm_head_sample",
    ("x[M,D]", "norm[D]", "w[V,D]", "temperature[M]", "seeds[M]", "positions[M]"),
    lm_head_sample,
    lambda w: 2.0 * w["M"] * w["V"] * w["D"],
    lambda w: _head_bytes(w) + 4.0 * w["M"],
)


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
            NORM_QKV_ROPE_WRITE,
            x, norm, w_qkv, None, None, None, cos_sin, pool, slots,
            eps=eps,
        )  # fmt: skip
        heads = ops(
            PAGED_ATTENTION,
            q[:, None], pool, page_table, context_lens, live.astype(jnp.int32), None,
            scale=scale,
        )  # fmt: skip
        x = ops(MATMUL, heads.reshape(x.shape[0], -1), w_o, None, x)
        h = ops(NORM_GATE_UP, x, norm2, w_gate_up, eps=eps)
        x = ops(MATMUL, h, w_down, None, x)
        pools.append(pool)
    return x, tuple(pools)


def dense_decode_greedy(
    ops: Any, *args: Any, eps: float, scale: float
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """`dense_decode_stack`, final norm [D], LM head [V,D] and arg-max.

    Takes the stack's arguments, then final_norm [D] and head [V,D]. Returns (tokens int32 [B],
    residual stream [B,D], pools). Ties go to the lowest id.
    """
    *stack, final_norm, head = args
    x, pools = ops(DENSE_DECODE_STACK, *stack, eps=eps, scale=scale)
    rows = x.shape[0]
    cold, seeds = jnp.zeros((rows,), f32), jnp.zeros((rows,), jnp.uint32)
    positions = jnp.zeros((rows,), jnp.int32)
    tokens = ops(LM_HEAD_SAMPLE, x, final_norm, head, cold, seeds, positions, eps=eps, greedy=True)
    return tokens, x, pools


def _decode_stack_weights(w: Workload) -> float:
    """Parameters of all layers (norms left out)."""
    query_dim = w["K"] * (w["G"] - 2) * w["H"]
    layer = w["K"] * w["G"] * w["H"] * w["D"] + w["D"] * query_dim + 3 * w["F"] * w["D"]
    return float(w["L"] * layer)


def _decode_stack_flops(w: Workload) -> float:
    heads = w["K"] * (w["G"] - 2)
    attention = 4.0 * w["L"] * w["B"] * heads * w["H"] * w["C"] * w["Z"]
    return 2.0 * w["B"] * (_decode_stack_weights(w) + w.get("V") * w["D"]) + attention


def _decode_stack_bytes(w: Workload) -> float:
    """Weights once and the whole bucket's keys and values; activations are negligible."""
    cache = 2.0 * w["L"] * w["B"] * w["C"] * w["Z"] * w["K"] * w["H"] * w.dtype("kv").itemsize
    weights = _decode_stack_weights(w) + w.get("V") * w["D"]
    return weights * w.dtype("qkv").itemsize + cache


_DECODE_STACK_INPUTS = (
    "x[B,D]",
    "attn_norm*[D]",
    "qkv*[K,G,H,D]",
    "o*[D,N]",
    "mlp_norm*[D]",
    "gate_up*[2,F,D]",
    "down*[D,F]",
    "kv*[P,2,K,Z,H]",
    "cos_sin[B,R]",
    "page_table[B,C]",
    "context_lens[B]",
)
DENSE_DECODE_STACK = Op(
    "dense_decode_stack",
    _DECODE_STACK_INPUTS,
    dense_decode_stack,
    _decode_stack_flops,
    _decode_stack_bytes,
)
DENSE_DECODE_GREEDY = Op(
    "dense_decode_greedy",
    (*_DECODE_STACK_INPUTS, "final_norm[D]", "head[V,D]"),
    dense_decode_greedy,
    _decode_stack_flops,
    _decode_stack_bytes,
)
