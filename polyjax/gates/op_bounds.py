"""For every op: the expected results of a case, the float32 reference with derived error bounds.

Each function below walks the op's own arithmetic with `error_bounds`: which sums are how long, and
where a correct implementation may round to the arguments' dtype (everywhere the reference does; a
fused kernel rounds less, never more). Sums are float32 sums, so accumulating in 16 bits shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyjax.core.noise import gumbel
from polyjax.core.op import REFERENCE
from polyjax.core.ops import OPS
from polyjax.gates import error_bounds as eb
from polyjax.gates.candidate import quick_compile
from polyjax.gates.error_bounds import Approx, exact
from polyjax.gates.expectation import BestToken, Bounded, Exact, Expected, Routed, WrittenPool
from polyjax.gates.inputs import Case

Results = tuple[np.ndarray, ...]


def truth(case: Case) -> Results:
    """The op's reference evaluated in float32 on upcast inputs; flat, float64 on the host."""
    static = dict(case.workload.static)
    if static.get("out_dtype"):
        static["out_dtype"] = "float32"
    args = jax.tree.map(_upcast, case.args)
    results = _reference(case.op.name, tuple(sorted(static.items())))(*args)
    return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(results))


def _upcast(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


@functools.cache
def _reference(name: str, static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    op = OPS[name]
    function = lambda *args: REFERENCE(op, *args, **dict(static))  # noqa: E731
    return jax.jit(function, compiler_options=quick_compile())


def expected(case: Case, wanted: Results, found: Results) -> tuple[Expected, ...]:
    """What each flat output must be. `wanted` is `truth(case)`; `found` matters to routing only."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        return _MODELS[case.op.name](case, wanted, found)


# -- pieces ----------------------------------------------------------------------------------


def _dtype(case: Case, name: str = "x") -> Any:
    return case.named[name].dtype


def _bounded(case: Case, wanted: np.ndarray, model: Approx, what: str = "out") -> Bounded:
    return Bounded(what, wanted.astype(np.float64), model.error, case.live)


def _normed(case: Case, x: Approx, norm: np.ndarray) -> Approx:
    return eb.rounded(eb.rms_norm(x, norm, case.static["eps"]), _dtype(case))


def _half(array: np.ndarray, index: int) -> np.ndarray:
    return np.split(array, 2, -1)[index]


def _plane(array: np.ndarray, index: int) -> np.ndarray:
    return array[:, index]


def _gated(gate: Approx, up: Approx, case: Case, dtype: Any) -> Approx:
    name = case.static.get("activation", "silu")
    return eb.rounded(eb.multiply(eb.activation(gate, name), up), dtype)


def _norm_gate_up(case: Case, x: Approx, norm: np.ndarray, w: np.ndarray) -> Approx:
    """w [2,F,D]; both projections are rounded before the activation."""
    y = eb.rounded(eb.dot(_normed(case, x, norm), exact(w.reshape(-1, w.shape[-1]))), _dtype(case))
    gate, up = (y.map(functools.partial(_half, index=i)) for i in (0, 1))
    return _gated(gate, up, case, _dtype(case))


def _qkv(
    case: Case, x: Approx, norm: np.ndarray, w: np.ndarray, cos_sin: np.ndarray | None
) -> tuple[Approx, Approx, Approx]:
    """(q [M,N,H], k [M,K,H], v [M,K,H]) of a fused projection w [K,G,H,D]."""
    named, dtype = case.named, _dtype(case)
    kv_heads, group, head_dim, width = w.shape
    bias = named.get("bias")
    addends = [] if bias is None else [exact(bias.reshape(1, -1))]
    y = eb.dot(_normed(case, x, norm), exact(w.reshape(-1, width)), *addends)
    y = eb.rounded(y, dtype).map(lambda a: a.reshape(-1, kv_heads, group, head_dim))
    q = y.map(lambda a: a[:, :, : group - 2].reshape(len(a), -1, head_dim))
    k, v = y.map(lambda a: a[:, :, group - 2]), y.map(lambda a: a[:, :, group - 1])
    for name in ("q_norm", "k_norm"):
        if named.get(name) is not None:
            part = _normed(case, q if name == "q_norm" else k, named[name])
            q, k = (part, k) if name == "q_norm" else (q, part)
    if cos_sin is not None:
        q, k = (eb.rounded(eb.rope(a, cos_sin), dtype) for a in (q, k))
    return q, k, v


def _attention(
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


def _gathered(pool: Approx, table: np.ndarray, plane: int) -> Approx:
    """One plane of every row's pages [B,K,S,H] of a pool [P,planes,K,Z,H]."""

    def gather(a: np.ndarray) -> np.ndarray:
        pages = a[table, plane].transpose(0, 2, 1, 3, 4)
        return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])

    return pool.map(gather)


def _stacked(k: Approx, v: Approx) -> Approx:
    """Keys and values [M,K,H] as the planes [M,2,K,H] of a pool."""
    return Approx(np.stack([k.value, v.value], 1), np.stack([k.error, v.error], 1))


def _new_rows(wanted: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[M,planes,K,H] of a pool at flat slots."""
    page = wanted.shape[3]
    return wanted[slots // page, :, :, slots % page]


# -- ops -------------------------------------------------------------------------------------


def _moved(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    return (Exact("out", wanted[0]),)


def _pool_moved(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    slots, before = case.named["slots"], case.named["kv"]
    rows = _new_rows(wanted[0], slots).astype(before.dtype)
    return (WrittenPool(before, slots, rows, None),)


def _rms_norm(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    return (_bounded(case, wanted[0], _normed(case, exact(case.named["x"]), case.named["weight"])),)


def _rope(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    x, cos_sin = case.named["x"], case.named["cos_sin"]
    model, rotary = eb.rounded(eb.rope(exact(x), cos_sin), x.dtype), cos_sin.shape[-1]
    model.error[..., rotary:] = 0.0  # moved, not computed
    return (_bounded(case, wanted[0], model),)


def _gated_activation(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    gate_up = exact(case.named["gate_up"])
    gate, up = (gate_up.map(functools.partial(_plane, index=i)) for i in (0, 1))
    return (_bounded(case, wanted[0], _gated(gate, up, case, _dtype(case, "gate_up"))),)


def _matmul(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    addends = [exact(a) for a in (named["bias"], named["residual"]) if a is not None]
    y = eb.dot(exact(named["x"]), exact(named["w"]), *addends)
    return (_bounded(case, wanted[0], eb.rounded(y, case.static.get("out_dtype") or _dtype(case))),)


def _norm_qkv_rope_write(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    q, k, v = _qkv(case, exact(named["x"]), named["norm"], named["w"], named["cos_sin"])
    error = eb.rounded(_stacked(k, v), named["kv"].dtype).error
    slots = named["slots"]
    pool = WrittenPool(named["kv"], slots, _new_rows(wanted[1], slots).astype(np.float64), error)
    return _bounded(case, wanted[0], q, "q"), pool


def _paged_attention(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    pool, table = exact(named["kv"]), named["page_table"]
    keys, values = _gathered(pool, table, 0), _gathered(pool, table, 1)
    queries = named["query_lens"].astype(int)
    out = _attention(exact(named["q"]), keys, values, case, queries, named["kv"].dtype)
    return (_bounded(case, wanted[0], _rounded_live(out, _dtype(case, "q"))),)


def _latent_attention(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    keys = _gathered(exact(named["kv"]), named["page_table"], 0)
    values = keys.map(lambda a: a[..., : case.static["rank"]])
    queries = named["query_lens"].astype(int)
    out = _attention(exact(named["q"]), keys, values, case, queries, named["kv"].dtype)
    return (_bounded(case, wanted[0], _rounded_live(out, _dtype(case, "q"))),)


def _rounded_live(a: Approx, dtype: Any) -> Approx:
    """Rounding, but a row that sees nothing is 0 without error."""
    idle = (a.error == 0) & (a.value == 0)
    return Approx(a.value, np.where(idle, 0.0, eb.rounded(a, dtype).error))


def _gate_up(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    return (
        _bounded(
            case, wanted[0], _norm_gate_up(case, exact(named["x"]), named["norm"], named["w"])
        ),
    )


def _logits(case: Case, x: Approx, norm: np.ndarray, head: np.ndarray) -> Approx:
    """Float32 logits; no rounding after the sum."""
    logits = eb.dot(_normed(case, x, norm), exact(head))
    return eb.soft_capped(logits, case.static.get("soft_cap", 0.0))


def _lm_head(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    return (_bounded(case, wanted[0], _logits(case, exact(named["x"]), named["norm"], named["w"])),)


def _lm_head_sample(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    logits = _logits(case, exact(named["x"]), named["norm"], named["w"])
    scores = logits
    if not case.static.get("greedy", False):
        hot = (named["temperature"] > 0)[:, None]
        temperature = np.where(hot, named["temperature"][:, None], 1.0).astype(np.float64)
        drawn = gumbel(named["seeds"], named["positions"], logits.shape[-1])
        noise = np.where(hot, np.asarray(drawn, np.float64), 0.0)
        scaled = logits.value / temperature
        # Two logarithms: the inner one's relative error is the outer one's absolute error.
        slack = 2 * (eb.TRANSCENDENTAL + 4 * eb.U32) * (1 + np.abs(noise) + np.abs(scaled))
        error = logits.error / temperature + np.where(hot, slack, 0.0)
        scores = Approx(scaled + noise, error)
    tied = wanted[0] if case.name == "ties" else None
    return (BestToken(scores.value, scores.error, case.live, tied),)


def _dense_decode(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    """Layer after layer; the pools' errors enter the attention that reads them."""
    named, dtype = case.named, _dtype(case)
    rows = case.rows
    assert rows is not None
    slots = rows.new_slots[:, 0].astype(int)
    queries = rows.query_lens.astype(int)
    x, pools = exact(named["x"]), []
    pools_wanted = wanted[-len(named["kv"]) :]
    for layer, before in enumerate(named["kv"]):
        q, k, v = _qkv(case, x, named["attn_norm"][layer], named["qkv"][layer], named["cos_sin"])
        pool, error = _pool_after(before, rows.earlier(), slots, k, v)
        written = _new_rows(pools_wanted[layer], slots).astype(np.float64)
        pools.append(WrittenPool(before, slots, written, error))
        keys, values = (_gathered(pool, named["page_table"], plane) for plane in (0, 1))
        out = _attention(q.map(lambda a: a[:, None]), keys, values, case, queries, before.dtype)
        heads = eb.rounded(out, dtype).map(lambda a: a.reshape(len(a), -1))
        x = eb.rounded(eb.dot(heads, exact(named["o"][layer]), x), dtype)
        h = _norm_gate_up(case, x, named["mlp_norm"][layer], named["gate_up"][layer])
        x = eb.rounded(eb.dot(h, exact(named["down"][layer]), x), dtype)
    if "head" not in named:
        return (_bounded(case, wanted[0], x, "x"), *pools)
    logits = _logits(case, x, named["final_norm"], named["head"])
    best = BestToken(logits.value, logits.error, case.live)
    return (best, _bounded(case, wanted[1], x, "x"), *pools)


def _pool_after(
    before: np.ndarray, owned: np.ndarray, slots: np.ndarray, k: Approx, v: Approx
) -> tuple[Approx, np.ndarray]:
    """The pool a step reads, poison left out, and the error [M,2,K,H] of the rows it wrote."""
    value = np.where(owned[:, None, None, :, None], before.astype(np.float64), 0.0)
    new = eb.rounded(_stacked(k, v), before.dtype)
    error, page = np.zeros_like(value), before.shape[3]
    live = slots > 0
    at = slots[live] // page, slice(None), slice(None), slots[live] % page
    value[at], error[at] = new.value[live], new.error[live]
    return Approx(value, error), new.error


def _route(case: Case, wanted: Results, found: Results) -> tuple[Expected, ...]:
    named, static = case.named, case.static
    logits = eb.dot(exact(named["x"]), exact(named["router"]))
    own = logits.error + 4 * eb.U32 * (np.abs(logits.value) + 1) + 2 * eb.TRANSCENDENTAL
    if static["scoring"] == "softmax":
        peak = logits.value.max(-1, keepdims=True)
        scores = np.exp(logits.value - peak)
        scores /= scores.sum(-1, keepdims=True)
        own = own + np.sum(scores * own, -1, keepdims=True) + 4 * eb.U32 * np.abs(peak)
    else:
        scores = 1 / (1 + np.exp(-logits.value))
    error = scores * np.expm1(np.minimum(own, 1.0)) + eb.SMALLEST
    bias = named["bias"]
    choosing = scores if bias is None else scores + bias.astype(np.float64)
    ids = np.clip(found[0], 0, scores.shape[1] - 1)
    weight, weight_error = (np.take_along_axis(a, ids, -1) for a in (scores, error))
    if static["normalize"]:
        total = weight.sum(-1, keepdims=True) + 1e-20
        weight_error = (weight_error + weight * weight_error.sum(-1, keepdims=True) / total) / total
        weight = weight / total
    scale = static.get("scale", 1.0)
    weight_error = scale * (weight_error + 2 * (eb.TRANSCENDENTAL + 8 * eb.U32) * weight)
    if static.get("groups", 1) > 1:  # groups are chosen by sums of two scores: ties are rare
        chosen: Expected = Exact("ids", wanted[0])
    else:
        chosen = Routed(choosing, error + 4 * eb.U32 * np.abs(choosing))
    return chosen, Bounded("weights", weight * scale, weight_error)


def _experts(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named, dtype = case.named, _dtype(case)
    error = np.zeros(named["x"].shape)
    for row, (ids, weights) in enumerate(zip(named["ids"], named["weights"], strict=True)):
        x = exact(named["x"][row : row + 1])
        for expert, weight in zip(ids, weights, strict=True):
            if not 0 <= expert < len(named["down"]):
                continue
            w_in = named["gate_up"][expert]
            gate, up = (eb.rounded(eb.dot(x, exact(w_in[i])), dtype) for i in (0, 1))
            y = eb.dot(_gated(gate, up, case, dtype), exact(named["down"][expert]))
            # One product and at most A additions in float32.
            rounding = 2 * (2 + len(ids)) * eb.U32 * np.abs(y.value)
            error[row] += float(weight) * (y.error + rounding)[0]
    return (_bounded(case, wanted[0], Approx(wanted[0].astype(np.float64), error)),)


def _head_matmul(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    x = exact(case.named["x"]).map(lambda a: a.swapaxes(0, 1))
    y = eb.dot(x, exact(case.named["w"])).map(lambda a: a.swapaxes(0, 1))
    return (_bounded(case, wanted[0], eb.rounded(y, _dtype(case))),)


_MODELS: dict[str, Callable[[Case, Results, Results], tuple[Expected, ...]]] = {
    "embed": _moved,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "kv_write": _pool_moved,
    "gated_activation": _gated_activation,
    "matmul": _matmul,
    "norm_qkv_rope_write": _norm_qkv_rope_write,
    "paged_attention": _paged_attention,
    "norm_gate_up": _gate_up,
    "lm_head": _lm_head,
    "lm_head_sample": _lm_head_sample,
    "dense_decode_stack": _dense_decode,
    "dense_decode_greedy": _dense_decode,
    "route": _route,
    "experts": _experts,
    "head_matmul": _head_matmul,
    "latent_write": _pool_moved,
    "latent_attention": _latent_attention,
}
