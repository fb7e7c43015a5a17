"""The knobs of a plan: compiler options, rungs of the ladder, ops left to their references.

A point of the space says a value for each knob; "base" leaves the plan to start from as it is.
Its edits are what a trial records. Illegal points are left out before anything compiles.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ScheduleError
from polyjax.core.op import REFERENCE_NAME
from polyjax.core.plan import Plan
from search.edits import Edit, Surroundings, apply, edit
from search.space import Point, Space
from search.traffic import Traffic

BASE = "base"
COMPILER_OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {
        "xla_backend_optimization_level": ("1", "2"),
        "xla_cpu_prefer_vector_width": ("128", "512"),
        "xla_cpu_enable_concurrency_optimized_scheduler": ("False",),
    },
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": ("True",),
        "xla_gpu_enable_triton_gemm": ("False",),
        "xla_gpu_exhaustive_tiling_search": ("True",),
        "xla_gpu_graph_min_graph_size": ("1", "20"),
    },
}
"""Platform -> XLA option -> values tried besides XLA's own. None changes what is computed."""

MAX_POINTS = 4096
_LONGEST_RUNGS = 6


def knobs(base: Plan, traffic: Traffic, page_size: int, platform: str) -> dict[str, list[str]]:
    """Returns knob -> values, "base" first.

    Rungs are comma-separated sizes to add: row counts and context pages of decode buckets, chunk
    lengths of prefill buckets, taken from the traffic or as powers of two.
    """
    ladder = base.ladder
    assert ladder is not None
    found = {
        f"option {name}": [BASE, *values]
        for name, values in COMPILER_OPTIONS.get(platform, {}).items()
    }
    decode, prefill = (traffic.steps.get(group, ()) for group in ("decode", "prefill"))
    rows = [len(step) for step in decode]
    pages = [-(-row.context // page_size) for step in decode for row in step]
    chunks = [row.tokens for step in prefill for row in step]
    sizes = {
        "decode sequences": (rows, [b.sequences for b in ladder.decode]),
        "decode pages": (pages, [b.pages for b in ladder.decode]),
        "prefill tokens": (chunks, [b.tokens for b in ladder.prefill]),
    }
    for name, (seen, present) in sizes.items():
        found[name] = [BASE, *_rung_choices(seen, present)]
    chosen = [key for key, choice in base.choices if choice.kernel != REFERENCE_NAME]
    ops = sorted({key.partition("[")[0] for key in chosen})
    found |= {f"kernel {op}": [BASE, "reference"] for op in ops}
    return {name: values for name, values in found.items() if len(values) > 1}


def _rung_choices(seen: Sequence[int], present: Sequence[int]) -> Iterable[str]:
    """Sets of sizes to add: the median and the largest seen, and powers of two below the top."""
    if not seen:
        return
    top = max(present)
    middle, most = sorted(seen)[len(seen) // 2], max(seen)
    doubled = [2**n for n in range(top.bit_length()) if 2**n < top]
    for sizes in ([most], [middle, most], doubled[-_LONGEST_RUNGS:]):
        new = sorted({min(size, top) for size in sizes} - set(present))
        if new:
            yield ",".join(map(str, new))


def edits_of(point: Point, base: Plan) -> tuple[Edit, ...]:
    """Returns the edits that lead from `base` to a point's plan."""
    values = {name: value for name, value in point if value != BASE}
    made = [
        edit("compiler_option", name.removeprefix("option "), value=value)
        for name, value in values.items()
        if name.startswith("option ")
    ]
    for name in values:
        if name.startswith("kernel "):
            op = name.removeprefix("kernel ")
            made += [
                edit("reference", key)
                for key, choice in base.choices
                if key.startswith(f"{op}[") and choice.kernel != REFERENCE_NAME
            ]
    return (*made, *_ladder_edits(values, base.ladder))


def _ladder_edits(values: Mapping[str, str], ladder: BucketLadder | None) -> Iterable[Edit]:
    assert ladder is not None
    sizes = {name: [int(size) for size in text.split(",")] for name, text in values.items()
             if name in ("decode sequences", "decode pages", "prefill tokens")}  # fmt: skip
    rows = {b.sequences for b in ladder.decode} | set(sizes.get("decode sequences", ()))
    pages = {b.pages for b in ladder.decode} | set(sizes.get("decode pages", ()))
    decode = {Bucket(1, count, width) for count in rows for width in pages} - set(ladder.decode)
    if ("decode sequences" in sizes or "decode pages" in sizes) and decode:
        yield edit("ladder", "decode", add=[[1, b.sequences, b.pages] for b in sorted(decode)])
    widest = max(b.pages for b in ladder.prefill)
    prefill = {Bucket(n, 1, widest) for n in sizes.get("prefill tokens", ())}
    if prefill - set(ladder.prefill):
        new = sorted(prefill - set(ladder.prefill))
        yield edit("ladder", "prefill", add=[[b.tokens, 1, b.pages] for b in new])
    samplers = {b.sequences for b in (*decode, *prefill)} - set(ladder.sampler_sequences)
    if samplers and (decode or prefill):
        yield edit("ladder", "sampler_sequences", add=sorted(samplers))


def plan_space(
    base: Plan, choices: Mapping[str, Sequence[str]], around: Surroundings, seed: int
) -> tuple[Space, dict[Point, Plan], dict[str, int]]:
    """Returns the space, each point's plan, and how many points were refused for which reason.

    Of points with equal plans the first stands. Beyond MAX_POINTS a seeded draw is taken, which
    keeps the base point.
    """
    names = list(choices)
    plans: dict[Point, Plan] = {}
    refused: dict[str, int] = {}
    seen: set[str] = set()
    for values in _drawn(itertools.product(*choices.values()), seed):
        point = tuple(zip(names, values, strict=True))
        try:
            plan = apply(base, edits_of(point, base), around)
        except ScheduleError as error:
            refused[str(error)] = refused.get(str(error), 0) + 1
            continue
        if plan.digest not in seen:
            seen.add(plan.digest)
            plans[point] = plan
    return Space(plans), plans, refused


def _drawn(points: Iterable[tuple[str, ...]], seed: int) -> list[tuple[str, ...]]:
    every = list(points)
    if len(every) <= MAX_POINTS:
        return every
    return [every[0], *random.Random(seed).sample(every[1:], MAX_POINTS - 1)]
