"""The prefill section of bench_kernels: causal attention of whole prompts, beside cuDNN.

cuDNN gets keys and values of the same tokens in one dense array; ours reads them by page. Each
schedule is checked against float32 attention computed on the device in slices.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import CATALOGUE
from pallas_kernels.points import Point, random_array
from pallas_kernels.timing import Chain, alternate
from polyjax.core.ops import PAGED_ATTENTION
from polyjax.core.results import Baseline, measured

f32 = jnp.float32
KERNEL = "mosaic_gpu.paged_attention.prefill"
PAGE_TOKENS = 64
HEADS = {"1b": (32, 8, 64), "8b": (32, 8, 128)}  # query heads, kv heads, head dim: Llama's
PROMPTS = ((8, 1024), (4, 2048), (1, 8192))  # sequences, tokens of each
GOAL_POINT = ("8b", 1, 8192)
SLICE_TOKENS = 512  # queries whose float32 scores are held at once
COMPARED_TOKENS = 64  # later tokens average more values: each stretch has a scale of its own


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One point, the rival's dense arguments, and the flops of its causal half."""

    point: Point
    dense: tuple[Any, ...]
    scale: float
    flops: float


@functools.partial(jax.jit, static_argnames="scale")
def exact_causal(q: Any, keys: Any, values: Any, scale: float) -> jax.Array:
    """q [B,T,N,H], keys and values [B,T,K,H] -> float32 [B,T,N,H], in slices of queries."""
    batch, tokens, _, dim = q.shape
    kv_heads, slices = keys.shape[2], tokens // SLICE_TOKENS
    grouped = q.reshape(batch, slices, SLICE_TOKENS, kv_heads, -1, dim).astype(f32)

    def pair(index: jax.Array) -> jax.Array:
        row, head = index // kv_heads, index % kv_heads
        k, v = keys[row, :, head].astype(f32), values[row, :, head].astype(f32)

        def some(part: jax.Array) -> jax.Array:
            queries = grouped[row, part, :, head]
            scores = jnp.einsum("tgh,sh->tgs", queries, k, precision="highest") * scale
            position = part * SLICE_TOKENS + jnp.arange(SLICE_TOKENS)
            seen = jnp.arange(tokens)[None] <= position[:, None]
            weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), -1)
            return jnp.einsum("tgs,sh->tgh", weights, v, precision="highest")

        return jax.lax.map(some, jnp.arange(slices))  # [slices, tokens, G, H]

    out = jax.lax.map(pair, jnp.arange(batch * kv_heads))
    out = out.reshape(batch, kv_heads, slices, SLICE_TOKENS, -1, dim)
    return out.transpose(0, 2, 3, 1, 4, 5).reshape(q.shape)


def distance_by_stretch(truth: np.ndarray) -> Callable[[np.ndarray], float]:
    """Returns the largest difference over the largest value, of the worst stretch of tokens."""

    def stretches(value: np.ndarray) -> np.ndarray:
        batch, tokens = value.shape[:2]
        return np.abs(value.reshape(batch * tokens // COMPARED_TOKENS, -1)).max(-1)

    return lambda value: float((stretches(value - truth) / stretches(truth)).max())


def prompt(model: str, batch: int, tokens: int) -> Prompt:
    heads, kv_heads, dim = HEADS[model]
    columns, scale = tokens // PAGE_TOKENS, dim**-0.5
    pool = random_array(1, batch * columns + 1, 2, kv_heads, PAGE_TOKENS, dim)
    order = np.random.default_rng(0).permutation(batch * columns) + 1
    page_table = jnp.asarray(order.reshape(batch, columns), jnp.int32)
    lens = jnp.full((batch,), tokens, jnp.int32)
    q = random_array(2, batch, tokens, heads, dim)
    paged = jnp.take(pool, page_table, axis=0).transpose(2, 0, 1, 4, 3, 5)
    keys, values = paged.reshape(2, batch, tokens, kv_heads, dim)
    truth = np.asarray(exact_causal(q, keys, values, scale))
    point = Point(
        f"{model}_{tokens}x{batch}",
        PAGED_ATTENTION.workload(q, pool, page_table, lens, lens, scale=scale),
        (CATALOGUE[KERNEL],),
        (1, "output", 0),
        ([pool], q, None, page_table, lens, lens),
        distance_by_stretch(truth),
        float(pool.nbytes + 2 * q.nbytes),
    )
    flops = 4.0 * batch * heads * dim * tokens * (tokens + 1) / 2
    return Prompt(point, (q, keys, values), scale, flops)


def cudnn(asked: Prompt) -> Chain | str:
    """cuDNN's fused attention, compiled and right, or why not."""

    def attend(sets: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            *sets[0], scale=asked.scale, is_causal=True, implementation="cudnn"
        )

    arguments = ([asked.dense],)
    try:
        chain = Chain("cudnn", jax.jit(attend).lower(*arguments).compile(), arguments, 1)
        error = asked.point.error(np.asarray(chain.compiled(*arguments), np.float32))
    except Exception as failure:  # a library that is absent or refuses the shape is an answer
        return " ".join(repr(failure).split())[:200]
    return chain if error < 0.03 else f"its error is {error}"


def show_trials(bench: Any, asked: Prompt) -> None:
    """Prints every schedule tried: what it reached, or why it is out."""
    for record in bench.log:
        if record["point"] != asked.point.name:
            continue
        us = record.get("us")
        reached = f"{us:8.1f} us {asked.flops / us / 1e6:5.0f} TFLOP/s" if us else "refused"
        why = record.get("failed") or f"error {record['error']:.4f}"
        print(f"  {asked.point.name} {reached} {why} {record['schedule']}", flush=True)


def bench_prefill(bench: Any, samples: int) -> None:
    """Measures every point; `bench` is bench_kernels' Bench."""
    prompts = {(model, *sizes): prompt(model, *sizes) for model in HEADS for sizes in PROMPTS}
    jobs = {key: bench.submit(asked.point) for key, asked in prompts.items()}
    rivals = {key: cudnn(asked) for key, asked in prompts.items()}
    ratios: dict[str, float] = {}
    for key, asked in prompts.items():
        ours, rival = bench.best(asked.point, jobs[key]), rivals[key]
        show_trials(bench, asked)
        if ours is None:
            print(f"{asked.point.name}: no schedule is right", flush=True)
            continue
        if isinstance(rival, str):
            print(f"{asked.point.name}: no cuDNN: {rival}", flush=True)
        timed = alternate([ours] if isinstance(rival, str) else [ours, rival], samples)
        report_point(bench, asked, ours.name, timed, ratios)
        if key == GOAL_POINT:
            report_fraction(bench, asked, ours.name, timed[ours.name])
    if len(ratios) == len(prompts):
        worst = min(ratios, key=ratios.__getitem__)
        bench.results.append(
            measured(
                "kernel_prefill_attention_vs_cudnn",
                list(ratios.values()),
                "ratio",
                value=ratios[worst],
                better="higher",
                goal=1.0,
                device=bench.device,
                note=f"worst: {worst}; samples: the points {', '.join(ratios)}; "
                "cuDNN reads dense keys and values",
            )
        )


def report_point(
    bench: Any, asked: Prompt, ours: str, timed: dict[str, list[float]], ratios: dict[str, float]
) -> None:
    ours_us, theirs = statistics.median(timed[ours]), timed.get("cudnn")
    ratio = statistics.median(theirs) / ours_us if theirs else None
    if ratio is not None:
        ratios[asked.point.name] = ratio
    print(f"{asked.point.name}: {ours_us:.1f} us, {ratio} of cuDNN's speed, {ours}", flush=True)
    bench.results.append(
        measured(
            f"kernel_prefill_attention_{asked.point.name}_us",
            timed[ours],
            "us",
            better="lower",
            device=bench.device,
            baseline=Baseline("cudnn", tuple(theirs)) if theirs else None,
            ratio=ratio,
            note=ours,
        )
    )


def report_fraction(bench: Any, asked: Prompt, ours: str, samples_us: list[float]) -> None:
    fractions = [asked.flops / (us * 1e-6) / bench.matmul_flops_per_s for us in samples_us]
    bench.results.append(
        measured(
            "kernel_prefill_attention_8k_matmul_fraction",
            fractions,
            "fraction",
            better="higher",
            goal=0.72,
            device=bench.device,
            note=f"Llama-8B heads, 8192 tokens, the causal half; of an 8192^3 product; {ours}",
        )
    )
