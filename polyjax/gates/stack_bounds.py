"""Expected results of the dense decode stack: a whole model's layers in one op."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polyjax.gates import error_bounds as eb
from polyjax.gates.error_bounds import Approx, exact
from polyjax.gates.expectation import BestToken, Expected, WrittenPool
from polyjax.gates.inputs import Case
from polyjax.gates.layer_bounds import (
    attention,
    bounded,
    dtype_of,
    gathered,
    logits_of,
    new_rows,
    norm_gate_up,
    qkv,
    stacked,
)

Results = tuple[np.ndarray, ...]
_SAMPLES = 12


def dense_decode(case: Case, wanted: Results, _found: Results) -> tuple[Expected, ...]:
    """Layers amplify errors, and bounds of bounds explode: what they do is sampled instead.

    The stack is run several times, each op's result moved at random within that op's own bound
    (Monte Carlo arithmetic: Parker 1997). Six standard deviations of the outcome are what correct
    implementations may differ by.
    """
    named = case.named
    assert case.rows is not None
    rng = np.random.default_rng(0)
    move = lambda a: exact(a.value + rng.uniform(-1, 1, a.shape) * a.error)  # noqa: E731
    centre = _stack(case, lambda a: exact(a.value))
    samples = [_stack(case, move) for _ in range(_SAMPLES)]
    x, *rows = (
        Approx(value, _spread(value, [sample[index] for sample in samples]))
        for index, value in enumerate(centre)
    )
    slots = case.rows.new_slots[:, 0].astype(int)
    pools = [
        WrittenPool(before, slots, new_rows(after, slots).astype(np.float64), row.error)
        for before, after, row in zip(named["kv"], wanted[-len(rows) :], rows, strict=True)
    ]
    if "head" not in named:
        return (bounded(case, wanted[0], x, "x"), *pools)
    logits = logits_of(case, x, named["final_norm"], named["head"])
    best = BestToken(logits.value, logits.error, case.live)
    return (best, bounded(case, wanted[1], x, "x"), *pools)


def _spread(centre: np.ndarray, samples: list[np.ndarray]) -> np.ndarray:
    """Six standard deviations around `centre`: an element's own or its row's, the larger.

    A row's is known better; an outlier's rounding is its own.
    """
    inner = tuple(range(1, centre.ndim))
    squares = np.mean([(sample - centre) ** 2 for sample in samples], axis=0)
    largest = np.maximum(squares, np.mean(squares, inner, keepdims=True))
    return eb.SIGMAS * np.sqrt(largest) + eb.SMALLEST


def _stack(case: Case, settle: Callable[[Approx], Approx]) -> list[np.ndarray]:
    """One run: residual stream [B,D], then the rows [B,2,K,H] each layer wrote."""
    named, dtype, rows = case.named, dtype_of(case), case.rows
    assert rows is not None
    slots, queries = rows.new_slots[:, 0].astype(int), rows.query_lens.astype(int)
    x, written = exact(named["x"]), []
    for layer, before in enumerate(named["kv"]):
        norm, w = named["attn_norm"][layer], named["qkv"][layer]
        q, k, v = (settle(a) for a in qkv(case, x, norm, w, named["cos_sin"]))
        new = stacked(k, v)
        written.append(new.value)
        pool = _pool_after(before, rows.earlier(), slots, new)
        keys, values = (gathered(pool, named["page_table"], plane) for plane in (0, 1))
        out = attention(q.map(lambda a: a[:, None]), keys, values, case, queries, before.dtype)
        heads = settle(eb.rounded(out, dtype)).map(lambda a: a.reshape(len(a), -1))
        x = settle(eb.rounded(eb.dot(heads, exact(named["o"][layer]), x), dtype))
        h = settle(norm_gate_up(case, x, named["mlp_norm"][layer], named["gate_up"][layer]))
        x = settle(eb.rounded(eb.dot(h, exact(named["down"][layer]), x), dtype))
    return [x.value, *written]


def _pool_after(before: np.ndarray, owned: np.ndarray, slots: np.ndarray, new: Approx) -> Approx:
    """The pool a step reads, poison left out."""
    value = np.where(owned[:, None, None, :, None], before.astype(np.float64), 0.0)
    live, page = slots > 0, before.shape[3]
    value[slots[live] // page, :, :, slots[live] % page] = new.value[live]
    return exact(value)
