"""Decode steps to measure: ours under a plan, and the same model as plain jitted JAX.

Every arm is one compiled program, state donated, driven like an engine would: tokens feed back on
the device, nothing is read until the end of a sample.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.op import Ops
from polyjax.core.ops import DENSE_DECODE_GREEDY

EPS, ROPE_THETA, PAGE_SIZE, FIRST_TOKEN = 1e-5, 500_000.0, 64, 7
WARM_UP_STEPS = 4  # XLA records its command buffer on the second run and replays from the third


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama's sizes (config.json of the published models)."""

    layers: int
    embed_dim: int
    kv_heads: int
    group: int
    head_dim: int
    ffw_dim: int
    vocab: int
    tied: bool

    def weight_bytes(self) -> int:
        """Bytes a step must read: every matrix once; of an untied embedding only the rows used."""
        heads = self.kv_heads * self.head_dim
        attention = self.embed_dim * heads * (2 * self.group + 2)
        layer = attention + 3 * self.embed_dim * self.ffw_dim + 2 * self.embed_dim
        return 2 * (self.layers * layer + self.embed_dim * (self.vocab + 1))

    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "1b": Shape(16, 2048, 8, 4, 64, 8192, 128256, tied=True),
    "8b": Shape(32, 4096, 8, 4, 128, 14336, 128256, tied=False),
}
STACK = ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down")


def random_weights(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Random bf16 weights in the engine's layout, drawn on the device."""
    keys = iter(jax.random.split(jax.random.key(seed), 8 * shape.layers + 8))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        return (0.02 * jax.random.normal(key, size, jnp.float32)).astype(jnp.bfloat16)

    def each(*size: int) -> tuple[jax.Array, ...]:
        return tuple(normal(next(keys), size) for _ in range(shape.layers))

    def norms() -> tuple[jax.Array, ...]:
        return tuple(1 + 5 * w for w in each(shape.embed_dim))

    d, h, queries = shape.embed_dim, shape.head_dim, shape.kv_heads * shape.group * shape.head_dim
    weights: dict[str, Any] = {
        "attn_norm": norms(),
        "qkv": each(shape.kv_heads, shape.group + 2, h, d),
        "o": each(d, queries),
        "mlp_norm": norms(),
        "gate_up": each(2, shape.ffw_dim, d),
        "down": each(d, shape.ffw_dim),
        "final_norm": 1 + 5 * normal(next(keys), (d,)),
        "head": normal(next(keys), (shape.vocab, d)),
    }
    weights["embedding"] = weights["head"] if shape.tied else normal(next(keys), (shape.vocab, d))
    return weights


def rope_table(shape: Shape, positions: int) -> jax.Array:
    """[positions, H] float32: cosines, then sines."""
    half = shape.head_dim // 2
    frequency = ROPE_THETA ** (-jnp.arange(half) / half)
    angle = jnp.arange(positions)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1).astype(jnp.float32)


@dataclasses.dataclass
class Arm:
    """A compiled step, its constants and its state (cache, tokens [B], context lengths [B])."""

    name: str
    compiled: Callable[..., Any]
    constants: tuple[Any, ...]
    cache: Any
    batch: int

    def sample(self, context: int, steps: int) -> float:
        """Microseconds a step, the first of `steps` with `context` tokens in the cache after it."""
        tokens = jnp.full((self.batch,), FIRST_TOKEN, jnp.int32)
        lens = jnp.full((self.batch,), context - 1, jnp.int32)
        cache = self.cache
        for _ in range(WARM_UP_STEPS):
            cache, tokens, _ = self.compiled(*self.constants, cache, tokens, lens + 0)
        lens = jnp.full((self.batch,), context - 1, jnp.int32)
        jax.block_until_ready((tokens, lens))
        begin = time.perf_counter()
        for _ in range(steps):
            cache, tokens, lens = self.compiled(*self.constants, cache, tokens, lens)
        jax.block_until_ready(tokens)
        self.cache = cache
        return (time.perf_counter() - begin) / steps * 1e6


def paged_cache(shape: Shape, batch: int, pages: int, seed: int = 1) -> tuple[jax.Array, ...]:
    """Pools with random keys and values; page 0 is the sink."""
    size = (batch * pages + 1, 2, shape.kv_heads, PAGE_SIZE, shape.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, size, jnp.bfloat16))
    return tuple(draw(jax.random.key(seed + layer)) for layer in range(shape.layers))


def page_table(batch: int, pages: int) -> jax.Array:
    """Pages of a sequence lie apart: column-major numbering."""
    return 1 + jnp.arange(batch)[:, None] + batch * jnp.arange(pages, dtype=jnp.int32)[None]


def step_arguments(
    weights: Mapping[str, Any], table: jax.Array, pages: jax.Array, cache: Any, tokens: jax.Array,
    lens: jax.Array,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of DENSE_DECODE_GREEDY for the token after `lens` cached ones."""
    stack = [weights[name] for name in STACK]
    rotation = table[jnp.minimum(lens, table.shape[0] - 1)]
    return (
        weights["embedding"][tokens], *stack, cache, rotation, pages, lens + 1,
        weights["final_norm"], weights["head"],
    )  # fmt: skip


def paged_step(ops: Callable[[], Ops], scale: float) -> Callable[..., Any]:
    """(weights, rope table, page table, pools, tokens, lens) -> (pools, tokens, lens + 1)."""

    def step(weights: Any, table: Any, pages: Any, cache: Any, tokens: Any, lens: Any) -> Any:
        arguments = step_arguments(weights, table, pages, cache, tokens, lens)
        tokens, _, cache = ops()(DENSE_DECODE_GREEDY, *arguments, eps=EPS, scale=scale)
        return cache, tokens, lens + 1

    return step


def compiled_paged(
    name: str, ops: Callable[[], Ops], shape: Shape, weights: Any, batch: int, pages: int
) -> Arm:
    """An arm over pools of `pages` pages a sequence; its cache is set by the caller."""
    table, places = rope_table(shape, pages * PAGE_SIZE), page_table(batch, pages)
    cache = jax.eval_shape(lambda: paged_cache(shape, batch, pages))
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = jax.jit(paged_step(ops, shape.head_dim**-0.5), donate_argnums=(3, 4, 5))
    compiled = step.lower(weights, table, places, cache, ints, ints).compile()
    return Arm(name, compiled, (weights, table, places), None, batch)


def plain_step(shape: Shape, keys_last: bool) -> Callable[..., Any]:
    """The model as a user would write it: contiguous cache [B,K,S,H], one matmul a projection.

    keys_last: matrices are stored [N,K] and multiplied as x @ w.T, else [K,N] and x @ w.
    """
    k, g, h = shape.kv_heads, shape.group, shape.head_dim

    def mm(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w.T if keys_last else x @ w

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS)
        return y.astype(x.dtype) * weight

    def rotate(x: jax.Array, cos_sin: jax.Array) -> jax.Array:
        cos, sin = jnp.split(cos_sin[:, None], 2, -1)
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def step(weights: Any, table: Any, cache: Any, tokens: Any, lens: Any) -> Any:
        batch, out = tokens.shape[0], []
        rows, x, rotation = jnp.arange(batch), weights["embedding"][tokens], table[lens]
        for layer, (keys, values) in enumerate(cache):
            w = {name: weights[name][layer] for name in STACK}
            q, key, value = jnp.split(
                mm(norm(x, w["attn_norm"]), w["qkv"]), [k * g * h, (k * g + k) * h], -1
            )
            q = rotate(q.reshape(batch, k * g, h), rotation).reshape(batch, k, g, h)
            keys = keys.at[rows, :, lens].set(rotate(key.reshape(batch, k, h), rotation))
            values = values.at[rows, :, lens].set(value.reshape(batch, k, h))
            s = jnp.einsum("bkgh,bksh->bkgs", q, keys, preferred_element_type=jnp.float32)
            seen = jnp.arange(keys.shape[2]) <= lens[:, None, None, None]
            p = jax.nn.softmax(jnp.where(seen, s * h**-0.5, -1e30), -1).astype(x.dtype)
            attended = jnp.einsum("bkgs,bksh->bkgh", p, values).reshape(batch, -1)
            x = x + mm(attended, w["o"])
            gate, up = jnp.split(mm(norm(x, w["mlp_norm"]), w["gate_up"]), 2, -1)
            x = x + mm(jax.nn.silu(gate) * up, w["down"])
            out.append((keys, values))
        logits = (norm(x, weights["final_norm"]) @ weights["head"].T).astype(jnp.float32)
        return out, jnp.argmax(logits, -1).astype(jnp.int32), lens + 1

    return step


def compiled_plain(shape: Shape, weights: Any, batch: int, capacity: int, keys_last: bool) -> Arm:
    """The plain arm with its own copy of the weights in its layout; cache set by the caller."""
    flat = {
        name: tuple(w.reshape(-1, w.shape[-1]) if w.ndim > 1 else w for w in weights[name])
        for name in STACK
    }
    if not keys_last:
        turn = jax.jit(jnp.transpose)
        flat = {n: tuple(turn(w) if w.ndim > 1 else w for w in ws) for n, ws in flat.items()}
    weights = {**weights, **flat}
    table = rope_table(shape, capacity)
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
    cache = jax.eval_shape(lambda: plain_cache(shape, batch, capacity))
    step = jax.jit(plain_step(shape, keys_last), donate_argnums=(2, 3, 4))
    compiled = step.lower(weights, table, cache, ints, ints).compile()
    return Arm("plain_jit", compiled, (weights, table), None, batch)


def plain_cache(shape: Shape, batch: int, capacity: int) -> list[tuple[jax.Array, jax.Array]]:
    size = (batch, shape.kv_heads, capacity, shape.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, size, jnp.bfloat16))
    return [
        (draw(jax.random.key(2 * layer)), draw(jax.random.key(2 * layer + 1)))
        for layer in range(shape.layers)
    ]
