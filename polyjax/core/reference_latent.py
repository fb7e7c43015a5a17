"""The plain-jnp meaning of multi-head latent attention ops (DeepSeek-V2 report, section 2.1).

The cache holds one latent of `rank` dims and one rotated key per token, side by side: L = rank + R.
Queries are brought into the latent's space (the absorbed form), so that all heads read one cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.reference import causal_mask, f32, gathered_pages, masked_softmax


def head_matmul(_ops: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """One matrix a head: x [M,N,I], w [N,O,I] -> [M,N,O]."""
    return jnp.einsum("mni,noi->mno", x, w, preferred_element_type=f32).astype(x.dtype)


def latent_write(_ops: Any, kv: jax.Array, latent: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes latent [M,L] at flat slots [M] of kv [P,1,1,Z,L]; in place if kv is donated."""
    page_size = kv.shape[3]
    page, offset = slots // page_size, slots % page_size
    kv = kv.at[page, 0, 0, offset].set(latent.astype(kv.dtype), mode="promise_in_bounds")
    return jax.lax.optimization_barrier(kv)  # as in kv_write


def latent_attention(
    _ops: Any,
    q: jax.Array,
    kv: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    scale: float,
    rank: int,
) -> jax.Array:
    """Causal attention whose keys are the cached L dims and whose values are the first `rank`.

    q [B,T,N,L], kv [P,1,1,Z,L], page_table [B,C], context_lens, query_lens [B] -> [B,T,N,rank].
    Scores and softmax are float32. Rows and tails without a token give 0.
    """
    keys = gathered_pages(kv, page_table, 0)[:, 0]  # [B,S,L]
    scores = jnp.einsum("btnl,bsl->btns", q, keys, preferred_element_type=f32) * scale
    mask = causal_mask(jnp.arange(keys.shape[1])[None, :], context_lens, query_lens, q.shape[1])
    weights = masked_softmax(scores, mask[:, :, None, :]).astype(kv.dtype)
    # As in paged_attention: an unowned slot may hold NaN.
    values = jnp.where(jnp.any(mask, axis=1)[:, :, None], keys[..., :rank], 0)
    out = jnp.einsum("btns,bsr->btnr", weights, values, preferred_element_type=f32)
    return out.astype(q.dtype)
