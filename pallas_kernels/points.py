"""Points the kernel bench times: inputs of decode shapes, their truth, how they are chained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import CATALOGUE
from pallas_kernels.tuning import linked
from polyjax.core.noise import gumbel
from polyjax.core.op import Kernel, Ops, Workload
from polyjax.core.ops import LM_HEAD, LM_HEAD_SAMPLE, MATMUL, PAGED_ATTENTION

f32, bf16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Point:
    """One thing to time: a workload, the chain's rotating argument, the truth of its last link."""

    name: str
    workload: Workload
    kernels: tuple[Kernel, ...]
    chained: tuple[int, str, int]
    arguments: tuple[Any, ...]
    error: Callable[[np.ndarray], float]
    bytes_per_link: float


def distance_from(truth: np.ndarray) -> Callable[[np.ndarray], float]:
    """Returns the largest difference from the truth over its largest value."""
    return lambda value: float(np.abs(value - truth).max() / np.abs(truth).max())


def shortfall_from(scores: np.ndarray) -> Callable[[np.ndarray], float]:
    """Returns how far the worst chosen token's score is below its row's best, over the largest."""

    def shortfall(tokens: np.ndarray) -> float:
        chosen = np.take_along_axis(scores, tokens.astype(np.int64)[:, None], 1)[:, 0]
        return float((scores.max(-1) - chosen).max() / np.abs(scores).max())

    return shortfall


def random_array(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, f32) * scale).astype(bf16)


def matmul_weights(n: int, k: int, sets: int) -> list[jax.Array]:
    return [random_array(i, n, k, scale=0.02) for i in range(sets)]


def matmul_point(
    name: str, weights: list[jax.Array], residual: bool, rows: int, link: str
) -> Point:
    n, k = weights[0].shape
    x, added = random_array(99, rows, k), random_array(98, rows, n) if residual else None
    last = weights if link == "output" else weights[-1:]
    truth = np.sum([exact_matmul(x, w) for w in last], axis=0)
    if added is not None:
        truth = truth + np.asarray(added, np.float32)
    return Point(
        f"{name}_m{rows}",
        MATMUL.workload(x, weights[0], None, added),
        (CATALOGUE["mosaic_gpu.matmul.gemv"], CATALOGUE["mosaic_gpu.matmul.stream"]),
        (1, link, 3),
        (weights, x, None, None, added),
        distance_from(truth),
        2.0 * n * k,
    )


@jax.jit
def _exact(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x.astype(f32), w.astype(f32).T, precision="highest")


def exact_matmul(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(_exact(x, w))


def exact_attention(q: Any, kv: Any, page_table: Any, scale: float) -> jax.Array:
    """Every sequence fills its pages."""
    batch, _, _, dim = q.shape
    kv_heads = kv.shape[2]
    paged = jnp.take(kv, page_table, axis=0).transpose(2, 0, 3, 1, 4, 5)
    keys, values = paged.reshape(2, batch, kv_heads, -1, dim).astype(f32)
    grouped = q.reshape(batch, kv_heads, -1, dim).astype(f32)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, precision="highest") * scale
    out = jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores, -1), values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype)


def attention_point(name: str, batch: int, context: int, sets: int) -> Point:
    heads, kv_heads, dim, page = 32, 8, 128, 64
    columns = context // page
    shape = (batch * columns + 1, 2, kv_heads, page, dim)
    pools = [random_array(i, *shape) for i in range(sets)]
    order = np.random.RandomState(0).permutation(batch * columns) + 1
    page_table = jnp.asarray(order.reshape(batch, columns), jnp.int32)
    lens, ones = jnp.full((batch,), context, jnp.int32), jnp.ones((batch,), jnp.int32)
    q = random_array(9, batch, 1, heads, dim)
    truth = q
    for pool in pools:
        truth = jax.jit(exact_attention, static_argnums=3)(truth, pool, page_table, dim**-0.5)
    return Point(
        name,
        PAGED_ATTENTION.workload(q, pools[0], page_table, lens, ones, scale=dim**-0.5),
        (CATALOGUE["mosaic_gpu.paged_attention.decode"],),
        (1, "output", 0),
        (pools, q, None, page_table, lens, ones),
        distance_from(np.asarray(truth, np.float32)),
        2.0 * batch * context * kv_heads * dim * 2,
    )


def head_points(rows: int) -> tuple[Point, Point, Callable[..., Any]]:
    """The bare head, the sampling head, and XLA's bare head, on the same weights."""
    vocabulary, width = 128256, 2048
    weights = matmul_weights(vocabulary, width, 2)
    x, norm = random_array(99, rows, width), jnp.ones((width,), bf16)
    y = x.astype(f32) * jax.lax.rsqrt(jnp.mean(x.astype(f32) ** 2, -1, keepdims=True) + 1e-5)
    logits = exact_matmul(y.astype(bf16), weights[-1])
    temperature = jnp.asarray([float(m % 2) for m in range(rows)], f32)  # greedy, hot, greedy ...
    seeds, positions = jnp.arange(rows, dtype=jnp.uint32), jnp.arange(rows, dtype=jnp.int32)
    noise = np.asarray(gumbel(seeds, positions, vocabulary)) * np.asarray(temperature)[:, None]
    row = temperature, seeds, positions
    bare = Point(
        f"head_m{rows}",
        LM_HEAD.workload(x, norm, weights[0], eps=1e-5),
        (CATALOGUE["mosaic_gpu.lm_head.stream"],),
        (2, "activation", 0),
        (weights, x, norm, None),
        distance_from(logits),
        0.0,
    )
    sampled = Point(
        f"head_sample_m{rows}",
        LM_HEAD_SAMPLE.workload(x, norm, weights[0], *row, eps=1e-5),
        (CATALOGUE["mosaic_gpu.lm_head_sample.stream"],),
        (2, "activation", 0),
        (weights, x, norm, None, *row),
        shortfall_from(logits + noise),
        0.0,
    )

    def xla(x: Any, norm: Any, w: Any) -> jax.Array:
        return LM_HEAD.reference(Ops({}, {}), x, norm, w, eps=1e-5)

    return bare, sampled, linked(xla, 2, "activation", 0)
