"""Mixture of experts and latent attention ops against plain numpy loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.core.arrays import reduction_bound
from polyjax.core.op import Ops
from polyjax.core.ops import EXPERTS, LATENT_ATTENTION, LATENT_WRITE, ROUTE

SHAPES = [(1, 2, 6), (7, 3, 5), (130, 2, 4), (5, 2, 64)]  # tokens, choices, experts
FFW, EMBED = 8, 16


def operands(tokens: int, choices: int, experts: int) -> tuple[np.ndarray, ...]:
    """x, ids (id `experts` is nobody's), weights, gate_up, down."""
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(experts + 1)[:choices] for _ in range(tokens)])
    return (
        rng.standard_normal((tokens, EMBED), np.float32),
        ids.astype(np.int32),
        rng.random((tokens, choices), np.float32),
        rng.standard_normal((experts, 2, FFW, EMBED), np.float32) / 4,
        rng.standard_normal((experts, EMBED, FFW), np.float32) / 4,
    )


def run_experts(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda *a: Ops({}, {})(EXPERTS, *a))(*arrays))


@pytest.mark.parametrize("tokens, choices, experts", SHAPES)
def test_experts_sum_what_their_tokens_chose(tokens: int, choices: int, experts: int) -> None:
    x, ids, weights, gate_up, down = arrays = operands(tokens, choices, experts)
    wanted, scale = np.zeros((tokens, EMBED)), np.zeros((tokens, EMBED))
    for token, choice in np.ndindex(ids.shape):
        if (expert := ids[token, choice]) == experts:
            continue
        gate, up = gate_up[expert].astype(np.float64) @ x[token]
        hidden = gate / (1 + np.exp(-gate)) * up
        wanted[token] += weights[token, choice] * (down[expert] @ hidden)
        scale[token] += weights[token, choice] * (np.abs(down[expert]) @ np.abs(hidden))
    # Three reductions in a row: over D, over F, over the choices; activations grow an error by < 4.
    bound = 4 * reduction_bound(np.float32, EMBED + FFW + choices)
    assert np.all(np.abs(run_experts(*arrays) - wanted) <= bound * scale + 1e-6)


@pytest.mark.parametrize("tokens, choices, experts", SHAPES)
def test_only_chosen_experts_are_computed(tokens: int, choices: int, experts: int) -> None:
    x, ids, weights, gate_up, down = operands(tokens, choices, experts)
    ids = np.minimum(ids, experts // 2)
    clean = run_experts(x, ids, weights, gate_up, down)
    gate_up[experts // 2 + 1 :] = down[experts // 2 + 1 :] = np.nan  # any use would spread
    np.testing.assert_array_equal(run_experts(x, ids, weights, gate_up, down), clean)


def test_route_keeps_to_the_best_groups() -> None:
    scores = np.array([[0.9, 0.1, 0.6, 0.5, 0.8, 0.0]], np.float32)  # groups of two: 1.0, 1.1, 0.8
    logits = np.log(np.maximum(scores, 1e-6) / (1 - np.minimum(scores, 1 - 1e-6)))
    route: dict[str, Any] = {"top_k": 2, "scoring": "sigmoid", "normalize": False}
    x = np.ones((1, 1), np.float32)
    ids, weights = Ops({}, {})(
        ROUTE, x, logits.T, None, **route, scale=2.0, groups=3, kept_groups=1
    )
    assert ids.tolist() == [[2, 3]]
    np.testing.assert_allclose(weights, [[1.2, 1.0]], rtol=1e-5)
    bias = np.array([0, 0, 0, 0, 0, 9], np.float32)  # chooses, but does not weigh
    ids, weights = Ops({}, {})(ROUTE, x, logits.T, bias, **route)
    assert ids.tolist() == [[5, 0]]
    np.testing.assert_allclose(weights, [[0.0, 0.9]], atol=1e-5)


def test_latent_attention_reads_what_was_written() -> None:
    rng = np.random.default_rng(0)
    page_size, rank, width, heads, context = 4, 5, 8, 3, 9
    kv = jnp.full((8, 1, 1, page_size, width), np.nan)
    table = np.array([[5, 2, 7, 0]], np.int32)
    latents = rng.standard_normal((context, width), np.float32)
    slots = table[0][np.arange(context) // page_size] * page_size + np.arange(context) % page_size
    kv = Ops({}, {})(LATENT_WRITE, kv, jnp.asarray(latents), jnp.asarray(slots))
    q = rng.standard_normal((1, 2, heads, width), np.float32)
    lens = (jnp.asarray([context]), jnp.asarray([2]))
    out = Ops({}, {})(LATENT_ATTENTION, q, kv, jnp.asarray(table), *lens, scale=0.3, rank=rank)
    for token, seen in ((0, context - 1), (1, context)):
        scores = np.exp(0.3 * q[0, token] @ latents[:seen].T)
        wanted = scores / scores.sum(-1, keepdims=True) @ latents[:seen, :rank]
        np.testing.assert_allclose(out[0, token], wanted, rtol=1e-5, atol=1e-6)
