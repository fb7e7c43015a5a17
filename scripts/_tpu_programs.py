"""Whole decode steps compiled for TPUs that are not there: by scripts/check_tpu --programs."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import models
from pallas_kernels import CATALOGUE
from pallas_kernels.tpu_compile import topology
from polyjax.compiler.choose import default_choices
from polyjax.compiler.program import (
    Kind,
    ProgramKey,
    ProgramRequest,
    abstract_call,
    trace_program,
)
from polyjax.compiler.state import StateSpec
from polyjax.core.buckets import Bucket
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.core.results import Result, measured

PAGE_SIZE, SCRATCH_PAGES = 64, 2
# Sizes of the published config.json files.
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One greedy decode step: a model on `ways` chips, with catalogue kernels or references."""

    name: str
    config: dict[str, Any]
    chip: str
    ways: int
    kernels: bool
    sequences: int = 8
    pages: int = 16


STEPS = (
    Step("smollm2_135m_references", SMOLLM2_135M, "TPU v5e", 1, kernels=False),
    Step("smollm2_135m_kernels", SMOLLM2_135M, "TPU v5e", 1, kernels=True),
    # Under a mesh a kernel needs a shard_map of its own, which ops do not have: references.
    Step("llama_8b_tp4_references", LLAMA_8B, "TPU v5e", 4, kernels=False),
    Step("llama_8b_kernels", LLAMA_8B, "TPU v5p", 1, kernels=True),
)


def request_of(step: Step) -> tuple[ProgramRequest, Any]:
    """Returns the program and the mesh of absent chips it is for."""
    config = models.family(step.config["architectures"][0]).Config.from_hf(step.config)
    mesh_plan = MeshPlan(model=step.ways)
    mesh = mesh_plan.mesh(topology(step.chip).devices)
    pages = step.sequences * step.pages + 1 + SCRATCH_PAGES
    spec = StateSpec(config, "bfloat16", PAGE_SIZE, (pages,), step.sequences, SCRATCH_PAGES)
    key = ProgramKey(Kind.DECODE_GREEDY, Bucket(1, step.sequences, step.pages))
    plan = Plan(mesh=mesh_plan)
    if step.kernels:
        traced = [abstract_call(ProgramRequest(spec, plan, key), mesh)]
        choices = default_choices(traced, CATALOGUE, chip(step.chip), {}, wherever_possible=True)
        plan = dataclasses.replace(plan, choices=choices)
    return ProgramRequest(spec, plan, key), mesh


def compile_step(step: Step) -> list[Result]:
    """Compiles one step. Returns its sizes and what the compiler's own cost model says."""
    started = time.perf_counter()
    request, mesh = request_of(step)
    traced, ops = trace_program(request, mesh)
    compiled = traced.lower().compile()
    took_s = time.perf_counter() - started
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    text = compiled.as_text()
    kernels = sum(name != "reference" for _, name in ops.used)
    calls = text.count('custom_call_target="tpu_custom_call"')
    copies = pool_copies(text, request, step.ways)
    note = (
        f"{step.sequences} sequences, {step.pages} pages of {PAGE_SIZE} tokens, {step.ways} "
        f"chip(s); {kernels} of {len(ops.used)} op calls by kernels, {calls} kernel calls in the "
        f"program; {copies} copies of whole pools; compiled in {took_s:.0f} s, never run"
    )
    print(f"{step.name}: {note}", flush=True)
    figures = {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "pool_copies": copies,
    }
    seconds = cost.get("optimal_seconds", -1.0)
    # It knows nothing of kernels, and counts an operation it has no model of as less than nothing.
    if seconds > 0 and calls == 0:
        figures["optimal_us"] = seconds * 1e6
    return [
        measured(
            f"tpu_step_{step.name}_{metric}",
            [value],
            {"optimal_us": "us", "pool_copies": "copies"}.get(metric, "bytes"),
            better="lower",
            device=f"{step.chip} (compiled for, not run)",
            note=note,
        )
        for metric, value in figures.items()
    ]


def pool_copies(text: str, request: ProgramRequest, ways: int) -> int:
    """Copies of an array as large as a KV pool in a compiled program; a good step has none."""
    spec = request.spec
    sizes = {
        spec.num_pages[index] * math.prod(group.page_shape(spec.page_size)) // ways
        for index, group in enumerate(spec.config.kv_groups())
    }
    shapes = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|copy-done)\(", text)
    return sum(math.prod(map(int, shape.split(","))) in sizes for shape in shapes)


def check(chips: list[str], names: list[str]) -> Iterator[list[Result]]:
    """Compiles the steps (all, or those named) that are for one of `chips`, one after another."""
    unknown = sorted(set(names) - {step.name for step in STEPS})
    if unknown:
        known = ", ".join(step.name for step in STEPS)
        raise ConfigError(f"--steps={','.join(unknown)}: there are {known}")
    for step in STEPS:
        if step.chip in chips and step.name in (names or [step.name]):
            print(f"{step.name}: compiling for {step.chip}", file=sys.stderr, flush=True)
            yield compile_step(step)
