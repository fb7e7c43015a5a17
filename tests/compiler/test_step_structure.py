"""The structure of whole decode steps on an H200, read off the lowered program; needs no device.

What a step costs beside its kernels is what breaks first and shows last: a kernel more a layer, a
copy of the KV pool, a pool that is not donated, an operation that a CUDA graph cannot hold.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import models
from pallas_kernels import CATALOGUE
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
from polyjax.core.plan import Plan
from tests import tiny_llama

H200 = chip("NVIDIA H200")
PAGES = 40
KERNEL = "mosaic_gpu_v2"
# Whole stacks in one kernel, and one kernel an op; gemv is another form of the same ops.
KERNELS = {
    "persistent": [n for n in CATALOGUE if n.endswith((".persistent", "sample.stream"))],
    "per_op": [n for n in CATALOGUE if not n.endswith((".persistent", ".gemv"))],
    "prefill": ["mosaic_gpu.paged_attention.prefill"],
    "reference": [],
}
# A graph holds none of these: they wait for the host, or XLA runs them as separate launches.
SPLITS_A_GRAPH = {
    *("while", "case", "if", "sort", "infeed", "outfeed", "send", "recv", "rng", "fft"),
    *("cholesky", "triangular_solve", "dynamic_gather", "dynamic_reshape"),
}
# What may produce an array of the pool's shape: the kernel, and what moves no byte.
IN_PLACE = {
    *("stablehlo.custom_call", "func.call", "sdy.sharding_constraint"),
    "stablehlo.reshape",  # of an array in row-major order
}


def spec(layers: int) -> StateSpec:
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    family = models.family("LlamaForCausalLM")
    config = family.Config.from_hf(tiny_llama.HF_CONFIG | sizes)
    return StateSpec(config, "bfloat16", 64, (PAGES,), num_slots=64, scratch_pages=8)


@functools.cache
def lowered(kernels: str, batch: int, layers: int, kind: Kind, tokens: int = 1) -> Any:
    """The step's StableHLO module for an H200, with every one of KERNELS that can run."""
    base, key = Plan(), ProgramKey(kind, Bucket(tokens, batch, 8 if tokens > 1 else 2))
    mesh = base.mesh.mesh()
    catalogue = {name: CATALOGUE[name] for name in KERNELS[kernels]}
    call = abstract_call(ProgramRequest(spec(layers), base, key), mesh)
    choices = default_choices([call], catalogue, H200, {}, wherever_possible=True)
    plan = dataclasses.replace(base, choices=choices)
    here = mesh.abstract_mesh
    device = AbstractDevice(H200.name, H200.num_sms, "gpu")
    there = AbstractMesh(here.axis_sizes, here.axis_names, here.axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(there):
        traced, _ = trace_program(ProgramRequest(spec(layers), plan, key), there, "gpu")
        return traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")


def operations(module: Any) -> Iterator[Any]:
    """Every operation as often as it runs: functions are entered at each of their calls."""
    functions = {
        op.attributes["sym_name"].value: op
        for op in module.body.operations
        if "sym_name" in op.attributes
    }

    def walk(op: Any) -> Iterator[Any]:
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield inner
                    if inner.operation.name == "func.call":
                        yield from walk(functions[inner.attributes["callee"].value])
                    else:
                        yield from walk(inner)

    return walk(functions["main"])


def kernels_run(module: Any) -> Counter[str]:
    return Counter(
        op.attributes["call_target_name"].value
        for op in operations(module)
        if op.operation.name == "stablehlo.custom_call"
    )


def makers_of_pools(module: Any) -> set[str]:
    """What the operations are called that have an array of the KV pool's shape as a result."""
    pool = f"tensor<{PAGES}x2x2x64x64xbf16>"
    return {
        op.operation.name
        for op in operations(module)
        if any(str(result.type) == pool for result in op.results)
    }


@pytest.mark.parametrize(
    ("layers", "kind"), [(2, Kind.DECODE_GUMBEL), (2, Kind.DECODE_GREEDY), (3, Kind.DECODE_GREEDY)]
)
def test_a_persistent_step_has_as_many_kernels_whatever_its_depth(layers: int, kind: Kind) -> None:
    module = lowered("persistent", 1, layers, kind)
    # With noise the layers, then the head with sampling; without, all of it is one.
    assert kernels_run(module) == {KERNEL: 1 if kind is Kind.DECODE_GREEDY else 2}


def test_a_kernel_per_op_step_is_five_kernels_a_layer() -> None:
    """Attention input, attention, output projection, gate and up, down."""
    # Beside them the embedding, and the head with sampling.
    assert kernels_run(lowered("per_op", 64, 2, Kind.DECODE_GREEDY)) == {KERNEL: 2 * 5 + 2}


def test_a_prompts_attention_is_one_kernel_a_layer_by_default() -> None:
    """The reference would gather whole page tables and write the scores of all of them."""
    base, key = Plan(), ProgramKey(Kind.PREFILL, Bucket(256, 2, 8))
    call = abstract_call(ProgramRequest(spec(2), base, key), base.mesh.mesh())
    chosen = {choice.kernel for _, choice in default_choices([call], CATALOGUE, H200, {})}
    assert "mosaic_gpu.paged_attention.prefill" in chosen
    assert kernels_run(lowered("prefill", 2, 2, Kind.PREFILL, tokens=256)) == {KERNEL: 2}


@pytest.mark.parametrize(("kernels", "batch"), [("persistent", 1), ("per_op", 64)])
def test_state_is_donated_and_pools_are_written_in_place(kernels: str, batch: int) -> None:
    module = lowered(kernels, batch, 2, Kind.DECODE_GREEDY)
    (main,) = (f for f in module.body.operations if f.attributes["sym_name"].value == "main")
    donated = [a for a in main.attributes["arg_attrs"] if "tf.aliasing_output" in a]
    assert len(donated) == 2 + 1  # a pool a layer, the last tokens
    makers = makers_of_pools(module)
    assert makers
    assert makers <= IN_PLACE
    names = {op.operation.name.removeprefix("stablehlo.") for op in operations(module)}
    assert not names & SPLITS_A_GRAPH
    assert set(kernels_run(module)) == {KERNEL}  # no callback, no library call


def test_a_step_without_kernels_would_be_noticed() -> None:
    """References write the pool by scatter."""
    module = lowered("reference", 1, 2, Kind.DECODE_GREEDY)
    assert not kernels_run(module)
    assert "stablehlo.scatter" in makers_of_pools(module) - IN_PLACE
