"""Formulations of ops that XLA compiles well where no kernel is chosen, by platform.

They mean what the references mean and are tested against them. On a CPU two things matter: the
weights must be the first operand of a product (as the second, XLA's CPU runtime takes a third
longer for a handful of rows), and attention must not gather whole page tables, so that a short
context costs the same in a program made for a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyjax.compiler.choose import DefaultingOps
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Choice, Kernel, Op
from polyjax.core.reference import causal_mask

BLOCK_TOKENS = 128
"""Context that one turn of the attention loop reads: small enough for caches, few turns."""

f32 = jnp.float32


def cpu_matmul(
    _ops: Any,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    out_dtype: str | None = None,
) -> jax.Array:
    """reference.matmul with the weights first; x [M,K], w [N,K] -> [M,N]."""
    y = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=f32)
    # Without the barrier XLA swaps the operands back to save the transpose.
    y = jax.lax.optimization_barrier(y).T
    if bias is not None:
        y = y + bias.astype(f32)
    if residual is not None:
        y = y + residual.astype(f32)
    return y.astype(out_dtype or x.dtype)


def cpu_paged_attention(
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
    """reference.paged_attention row by row, over the blocks of pages that a row really has.

    Softmax is taken online (Milakov and Gimelshein 2018): a running maximum and sum per query.
    """
    first = jnp.zeros_like(context_lens) if first_pages is None else first_pages

    def row(operands: tuple[jax.Array, ...]) -> jax.Array:
        return _attend_row(kv, *operands, scale=scale, window=window, soft_cap=soft_cap)

    return jax.lax.map(row, (q, page_table, context_lens, query_lens, first))


def _attend_row(
    kv: jax.Array,
    q: jax.Array,
    pages: jax.Array,
    context_len: jax.Array,
    query_len: jax.Array,
    first_page: jax.Array,
    *,
    scale: float,
    window: int,
    soft_cap: float,
) -> jax.Array:
    """q [T,N,H], pages [C] -> [T,N,H]."""
    tokens, heads, head_dim = q.shape
    _, _, kv_heads, page_size, _ = kv.shape
    per_block = min(max(BLOCK_TOKENS // page_size, 1), pages.shape[0])
    pages = jnp.pad(pages, (0, -pages.shape[0] % per_block))
    grouped = q.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 0, 2, 3)
    grouped = grouped.reshape(kv_heads, -1, head_dim)  # [K,T*G,H]

    def block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ids = jax.lax.dynamic_slice_in_dim(pages, index * per_block, per_block)
        gathered = kv.at[ids].get(mode="clip").transpose(1, 2, 0, 3, 4)  # [2,K,C,Z,H]
        keys, values = gathered.reshape(2, kv_heads, -1, head_dim)
        position = (first_page + index * per_block) * page_size + jnp.arange(keys.shape[1])
        mask = causal_mask(position[None], context_len[None], query_len[None], tokens, window)[0]
        mask = jnp.repeat(mask, heads // kv_heads, axis=0)[None]
        return _online_softmax(grouped, keys, values, mask, carry, scale, soft_cap)

    rows = (kv_heads, grouped.shape[1], 1)
    start = (jnp.full(rows, -jnp.inf, f32), jnp.zeros(rows, f32), jnp.zeros(grouped.shape, f32))
    last = -(-(context_len - first_page * page_size) // (per_block * page_size))
    blocks = jnp.where(query_len > 0, jnp.minimum(last, pages.shape[0] // per_block), 0)
    _, total, out = jax.lax.fori_loop(0, blocks, block, start)
    out = out / jnp.where(total == 0.0, 1.0, total)
    out = out.reshape(kv_heads, tokens, -1, head_dim).transpose(1, 0, 2, 3)
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)


def _online_softmax(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    carry: tuple[jax.Array, ...],
    scale: float,
    soft_cap: float,
) -> tuple[jax.Array, ...]:
    """Folds one block into (peak, total, out), each [K,T*G,1 or H]."""
    peak, total, out = carry
    batched = (((2,), (2,)), ((0,), (0,)))
    scores = jax.lax.dot_general(queries, keys, batched, preferred_element_type=f32) * scale
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    higher = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
    finite = jnp.where(jnp.isfinite(higher), higher, 0.0)
    weights, fade = jnp.exp(scores - finite), jnp.exp(peak - finite)
    # Unowned slots may hold anything, NaN included, and 0 * NaN is NaN: mask the values too.
    seen = jnp.any(mask, axis=1)[:, :, None]
    values = jnp.where(seen, values, 0)
    weighted = jax.lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=f32,
    )
    return higher, total * fade + jnp.sum(weights, axis=-1, keepdims=True), out * fade + weighted


FORMS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "cpu": {"matmul": cpu_matmul, "paged_attention": cpu_paged_attention},
}
"""Platform -> op name -> function with the arguments of the op's reference."""


class PlatformOps(DefaultingOps):
    """Ops that fall back to the platform's form of an op before its reference."""

    def __init__(
        self,
        choices: Mapping[str, Choice],
        catalogue: Mapping[str, Kernel],
        platform: str,
        chip: ChipSpec | None = None,
    ):
        super().__init__(choices, catalogue, chip)
        self._forms = FORMS.get(platform, {})

    def __call__(
        self, op: Op, *args: Any, reference: Callable[..., Any] | None = None, **static: Any
    ) -> Any:
        if reference is None and not self.chosen(op, *args, **static):
            reference = self._forms.get(op.name)
        return super().__call__(op, *args, reference=reference, **static)
