"""What the layers of a transformer are made of, with error bars: pieces of `op_bounds`.

Each function walks the reference's arithmetic; a correct implementation may round to the arguments'
dtype wherever the reference does.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from polyjax.gates import error_bounds as eb
from polyjax.gates.error_bounds import Approx, exact
from polyjax.gates.expectation import Bounded
from polyjax.gates.inputs import Case


def dtype_of(case: Case, name: str = "x") -> Any:
    return case.named[name].dtype


def bounded(case: Case, wanted: np.ndarray, model: Approx, what: str = "out") -> Bounded:
    return Bounded(what, wanted.astype(np.float64), model.error, case.live)


def normed(case: Case, x: Approx, norm: np.ndarray) -> Approx:
    return eb.rounded(eb.rms_norm(x, norm, case.static["eps"]), dtype_of(case))


def _half(array: np.ndarray, index: int) -> np.ndarray:
    return np.split(array, 2, -1)[index]


def plane_of(array: np.ndarray, index: int) -> np.ndarray:
    return array[:, index]


def gated(gate: Approx, up: Approx, case: Case, dtype: Any) -> Approx:
    name = case.static.get("activation", "silu")
    return eb.rounded(eb.multiply(eb.activation(gate, name), up), dtype)


def norm_gate_up(case: Case, x: Approx, norm: np.ndarray, w: np.ndarray) -> Approx:
    """w [2,F,D]; both projections are rounded before the activation."""
    y = eb.rounded(eb.dot(normed(case, x, norm), exact(w.reshape(-1, w.shape[-1]))), dtype_of(case))
    gate, up = (y.map(functools.partial(_half, index=i)) for i in (0, 1))
    return gated(gate, up, case, dtype_of(case))


def qkv(
    case: Case, x: Approx, norm: np.ndarray, w: np.ndarray, cos_sin: np.ndarray | None
) -> tuple[Approx, Approx, Approx]:
    """(q [M,N,H], k [M,K,H], v [M,K,H]) of a fused projection w [K,G,H,D]."""
    named, dtype = case.named, dtype_of(case)
    kv_heads, group, head_dim, width = w.shape
    bias = named.get("bias")
    addends = [] if bias is None else [exact(bias.reshape(1, -1))]
    y = eb.dot(normed(case, x, norm), exact(w.reshape(-1, width)), *addends)
    y = eb.rounded(y, dtype).map(lambda a: a.reshape(-1, kv_heads, group, head_dim))
    q = y.map(lambda a: a[:, :, : group - 2].reshape(len(a), -1, head_dim))
    k, v = y.map(lambda a: a[:, :, group - 2]), y.map(lambda a: a[:, :, group - 1])
    for name in ("q_norm", "k_norm"):
        if named.get(name) is not None:
            part = normed(case, q if name == "q_norm" else k, named[name])
            q, k = (part, k) if name == "q_norm" else (q, part)
    if cos_sin is not None:
        q, k = (eb.rounded(eb.rope(a, cos_sin), dtype) for a in (q, k))
    return q, k, v


def attention(
    q: Approx, keys: Approx, values: Approx, case: Case, queries: np.ndarray, weights: Any
) -> Approx:
    """q [B,T,N,H], keys and values [B,K,S,·] gathered by page table -> [B,T,N,·], not rounded."""
    batch, tokens, heads, _ = q.shape
    kv_heads = keys.shape[1]
    named, static = case.named, case.static
    first = named.get("first_pages")
    page = named["kv"][0].shape[3] if isinstance(named["kv"], tuple) else named["kv"].shape[3]
    starts = np.zeros(batch, int) if first is None else first.astype(int) * page
    slots = starts[:, None] + np.arange(keys.shape[2])
    contexts = named["context_lens"].astype(int)
    positions = (contexts - queries)[:, None] + np.arange(tokens)
    mask = (slots[:, None] <= positions[..., None]) & (np.arange(tokens) < queries[:, None])[
        ..., None
    ]
    if static.get("window", 0):
        mask &= slots[:, None] > positions[..., None] - static["window"]
    seen = mask.any(1)[:, None, :, None]
    hide = lambda a: np.where(seen, a, 0.0)  # noqa: E731
    grouped = q.map(
        lambda a: (
            a.reshape(batch, tokens, kv_heads, heads // kv_heads, -1)
            .transpose(0, 2, 1, 3, 4)
            .reshape(batch, kv_heads, -1, a.shape[-1])
        )
    )
    scores = eb.dot(grouped, keys.map(hide))
    scale = static["scale"]
    scores = Approx(
        scores.value * scale, scores.error * scale + 4 * eb.U32 * abs(scores.value * scale)
    )
    scores = eb.soft_capped(scores, static.get("soft_cap", 0.0))
    wide = np.repeat(mask[:, None, :, None], heads // kv_heads, 3).reshape(
        batch, 1, -1, mask.shape[-1]
    )
    out = eb.softmax_products(scores, wide, values.map(hide), weights)
    return out.map(
        lambda a: (
            a.reshape(batch, kv_heads, tokens, heads // kv_heads, -1)
            .transpose(0, 2, 1, 3, 4)
            .reshape(batch, tokens, heads, -1)
        )
    )


def gathered(pool: Approx, table: np.ndarray, plane: int) -> Approx:
    """One plane of every row's pages [B,K,S,H] of a pool [P,planes,K,Z,H]."""

    def gather(a: np.ndarray) -> np.ndarray:
        pages = a[table, plane].transpose(0, 2, 1, 3, 4)
        return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])

    return pool.map(gather)


def stacked(k: Approx, v: Approx) -> Approx:
    """Keys and values [M,K,H] as the planes [M,2,K,H] of a pool."""
    return Approx(np.stack([k.value, v.value], 1), np.stack([k.error, v.error], 1))


def new_rows(wanted: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[M,planes,K,H] of a pool at flat slots."""
    page = wanted.shape[3]
    return wanted[slots // page, :, :, slots % page]


def logits_of(case: Case, x: Approx, norm: np.ndarray, head: np.ndarray) -> Approx:
    """Float32 logits; no rounding after the sum."""
    logits = eb.dot(normed(case, x, norm), exact(head))
    return eb.soft_capped(logits, case.static.get("soft_cap", 0.0))
