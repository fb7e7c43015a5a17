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
from polyjax.gates.layer_bounds import (
    attention,
    bounded,
    dtype_of,
    gated,
    gathered,
    logits_of,
    new_rows,
    norm_gate_up,
    normed,
    plane_of,
    qkv,
    stacked,
)
from polyjax.gates.stack_bounds import dense_decode

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


def _moved(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    return (Exact("out", wanted[0]),)


def _pool_moved(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    slots, before = case.named["slots"], case.named["kv"]
    rows = new_rows(wanted[0], slots).astype(before.dtype)
    return (WrittenPool(before, slots, rows, None),)


def _rms_norm(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    return (bounded(case, wanted[0], normed(case, exact(case.named["x"]), case.named["weight"])),)


def _rope(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    x, cos_sin = case.named["x"], case.named["cos_sin"]
    model, rotary = eb.rounded(eb.rope(exact(x), cos_sin), x.dtype), cos_sin.shape[-1]
    model.error[..., rotary:] = 0.0  # moved, not computed
    return (bounded(case, wanted[0], model),)


def _gated_activation(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    gate_up = exact(case.named["gate_up"])
    gate, up = (gate_up.map(functools.partial(plane_of, index=i)) for i in (0, 1))
    return (bounded(case, wanted[0], gated(gate, up, case, dtype_of(case, "gate_up"))),)


def _matmul(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    addends = [exact(a) for a in (named["bias"], named["residual"]) if a is not None]
    y = eb.dot(exact(named["x"]), exact(named["w"]), *addends)
    return (
        bounded(case, wanted[0], eb.rounded(y, case.static.get("out_dtype") or dtype_of(case))),
    )


def _norm_qkv_rope_write(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    q, k, v = qkv(case, exact(named["x"]), named["norm"], named["w"], named["cos_sin"])
    error = eb.rounded(stacked(k, v), named["kv"].dtype).error
    slots = named["slots"]
    pool = WrittenPool(named["kv"], slots, new_rows(wanted[1], slots).astype(np.float64), error)
    return bounded(case, wanted[0], q, "q"), pool


def _paged_attention(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    pool, table = exact(named["kv"]), named["page_table"]
    keys, values = gathered(pool, table, 0), gathered(pool, table, 1)
    queries = named["query_lens"].astype(int)
    out = attention(exact(named["q"]), keys, values, case, queries, named["kv"].dtype)
    return (bounded(case, wanted[0], _rounded_live(out, dtype_of(case, "q"))),)


def _latent_attention(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    keys = gathered(exact(named["kv"]), named["page_table"], 0)
    values = keys.map(lambda a: a[..., : case.static["rank"]])
    queries = named["query_lens"].astype(int)
    out = attention(exact(named["q"]), keys, values, case, queries, named["kv"].dtype)
    return (bounded(case, wanted[0], _rounded_live(out, dtype_of(case, "q"))),)


def _rounded_live(a: Approx, dtype: Any) -> Approx:
    """Rounding, but a row that sees nothing is 0 without error."""
    idle = (a.error == 0) & (a.value == 0)
    return Approx(a.value, np.where(idle, 0.0, eb.rounded(a, dtype).error))


def _gate_up(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    return (
        bounded(case, wanted[0], norm_gate_up(case, exact(named["x"]), named["norm"], named["w"])),
    )


def _lm_head(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    return (
        bounded(case, wanted[0], logits_of(case, exact(named["x"]), named["norm"], named["w"])),
    )


def _lm_head_sample(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    named = case.named
    logits = logits_of(case, exact(named["x"]), named["norm"], named["w"])
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
    error = np.minimum(scores * np.expm1(np.minimum(own, 50.0)), 1.0) + eb.SMALLEST
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
    named, dtype = case.named, dtype_of(case)
    error = np.zeros(named["x"].shape)
    for row, (ids, weights) in enumerate(zip(named["ids"], named["weights"], strict=True)):
        x = exact(named["x"][row : row + 1])
        for expert, weight in zip(ids, weights, strict=True):
            if not 0 <= expert < len(named["down"]):
                continue
            w_in = named["gate_up"][expert]
            gate, up = (eb.rounded(eb.dot(x, exact(w_in[i])), dtype) for i in (0, 1))
            y = eb.dot(gated(gate, up, case, dtype), exact(named["down"][expert]))
            # One product and at most A additions in float32.
            rounding = 2 * (2 + len(ids)) * eb.U32 * np.abs(y.value)
            error[row] += float(weight) * (y.error + rounding)[0]
    return (bounded(case, wanted[0], Approx(wanted[0].astype(np.float64), error)),)


def _head_matmul(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    x = exact(case.named["x"]).map(lambda a: a.swapaxes(0, 1))
    y = eb.dot(x, exact(case.named["w"])).map(lambda a: a.swapaxes(0, 1))
    return (bounded(case, wanted[0], eb.rounded(y, dtype_of(case))),)


DEPENDS_ON_FOUND = frozenset({"route"})  # its weights are those of the experts that were chosen

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
    "dense_decode_stack": dense_decode,
    "dense_decode_greedy": dense_decode,
    "route": _route,
    "experts": _experts,
    "head_matmul": _head_matmul,
    "latent_write": _pool_moved,
    "latent_attention": _latent_attention,
}
