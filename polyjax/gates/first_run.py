"""A program's first run, in a process that can be killed: a hang or crash there costs no request.

    engine --- JSON line {"id", "request", "cache"} ---> first-run process
    engine <-- JSON line {"id", "entry": "", "error"} --- first-run process

The program is compiled for a pool of few pages and runs on weights and pages of random numbers:
kernels do not know the number of pages, and weights of one shape share one array, so a model that
fills the device fits a second time. It must end, return finite results and leave every page alone
that is not its rows' own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyjax.compiler.cache import ProgramCache
from polyjax.compiler.program import (
    DECODES,
    SAMPLERS,
    Kind,
    ProgramRequest,
    StepProgram,
    compile_program,
)
from polyjax.compiler.state import StateSpec, head_indices, state_avals
from polyjax.compiler.worker import answer_requests
from polyjax.core.batch_layout import BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.core.mesh import MeshPlan
from polyjax.gates.scratch import ScratchSpace

_USABLE_PAGES = 7  # beside the sink and scratch: pages that must not change
_WEIGHT_SCALE = 0.05
RUNNABLE = (Kind.PREFILL, *DECODES, *SAMPLERS, Kind.SCORE)


@dataclasses.dataclass
class SmallState:
    """The arrays of a state with few pages. `params` and `head` are never written."""

    params: tuple[jax.Array, ...]
    head: tuple[jax.Array, ...]
    kv: tuple[jax.Array, ...]
    last_tokens: jax.Array
    sampling: Any


def small_spec(spec: StateSpec) -> StateSpec:
    """The same state with so few pages that it fits beside a serving engine."""
    most = 1 + _USABLE_PAGES + spec.scratch_pages
    return dataclasses.replace(spec, num_pages=tuple(min(n, most) for n in spec.num_pages))


def small_state(spec: StateSpec, mesh_plan: MeshPlan) -> SmallState:
    """Random weights and pages. Weights of one shape are the same array."""
    avals = state_avals(spec, mesh_plan, mesh_plan.mesh())
    rng = np.random.default_rng()

    def noise(aval: Any, scale: float) -> jax.Array:
        values = rng.standard_normal(aval.shape, np.float32) * scale
        return jax.device_put(values.astype(jnp.dtype(aval.dtype)), aval.sharding)

    @functools.cache
    def weight(shape: Any, dtype: Any, sharding: Any) -> jax.Array:
        aval = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        if not jnp.issubdtype(dtype, jnp.floating):
            return jax.device_put(np.zeros(shape, dtype), sharding)
        return noise(aval, _WEIGHT_SCALE)

    def zeros(aval: Any) -> jax.Array:
        return jax.device_put(np.zeros(aval.shape, aval.dtype), aval.sharding)

    params = tuple(weight(aval.shape, aval.dtype, aval.sharding) for aval in avals.params)
    return SmallState(
        params,
        tuple(params[index] for index in head_indices(spec)),
        tuple(noise(aval, 1.0) for aval in avals.kv),
        zeros(avals.last_tokens),
        jax.tree.map(zeros, avals.sampling),
    )


def first_run(request: ProgramRequest) -> None:
    """Compiles and runs a program once. Raises whatever is wrong with it, AssertionError included.

    Kinds that call no op are not run.
    """
    if request.key.kind not in RUNNABLE:
        return
    request = dataclasses.replace(request, spec=small_spec(request.spec))
    program = compile_program(request, request.plan.mesh.mesh())
    state = small_state(request.spec, request.plan.mesh)
    if request.key.kind in (*SAMPLERS, Kind.SCORE):
        _run_head(program, request, state)
    else:
        _run_forward(program, request, state)


def _run_forward(program: StepProgram, request: ProgramRequest, state: SmallState) -> None:
    spec, key = request.spec, request.key
    space = ScratchSpace(spec)
    rows = space.rows(key.bucket, np.random.default_rng(), key.kind is Kind.DECODE_GUMBEL)
    before = [np.array(pool) for pool in state.kv]
    outputs = program(state.params, state.kv, state.last_tokens, space.pack(rows, key.bucket))
    kv, hidden = outputs[0], outputs[1] if key.kind is Kind.PREFILL else outputs[3]
    live = np.asarray(hidden).astype(np.float32)[: len(rows.tokens)]
    assert np.isfinite(live).all(), "a hidden state is not finite"
    if key.kind in DECODES:
        _check_tokens(np.asarray(outputs[2])[: len(rows.tokens)], spec)
    for layer, (was, pool) in enumerate(zip(before, kv, strict=True)):
        now = np.asarray(pool)
        kept = now[1 : len(now) - spec.scratch_pages + space.num_read]
        changed = _bits(kept) != _bits(was[1 : 1 + len(kept)])
        pages = np.flatnonzero(changed.reshape(len(kept), -1).any(axis=1)) + 1
        assert not len(pages), f"layer {layer}: page {pages[0]} changed, though no row writes it"


def _run_head(program: StepProgram, request: ProgramRequest, state: SmallState) -> None:
    spec, key = request.spec, request.key
    count = key.bucket.tokens if key.kind is Kind.SCORE else key.bucket.sequences
    rng = np.random.default_rng()
    hidden = rng.standard_normal((count, spec.config.embed_dim)).astype(np.dtype(spec.dtype))
    if key.kind is Kind.SCORE:
        targets = rng.integers(0, spec.config.vocab_size, count).astype(np.int32)
        mask = np.full(spec.score_mask_shape(count), -1, np.int32)
        scores = np.asarray(program(state.head, hidden, targets, mask)).view(np.float32)
        assert np.isfinite(scores[:, :1]).all(), "a log-probability is not finite"
        return
    space, bucket = ScratchSpace(spec), Bucket(1, count, 1)
    rows = space.rows(bucket, rng, key.kind is not Kind.SAMPLE_GREEDY)
    layout = BatchLayout(bucket, len(spec.num_pages))
    flat = space.pack(rows, bucket)[: layout.sampler_size]
    if key.kind is Kind.SAMPLE_FULL:
        mask = np.full((count, spec.mask_words), -1, np.int32)
        results = program(state.head, state.last_tokens, state.sampling, hidden, flat, mask)
    else:
        results = program(state.head, state.last_tokens, hidden, flat)
    tokens = results[-1]
    _check_tokens(np.asarray(tokens)[: len(rows.tokens)], spec)


def _check_tokens(tokens: np.ndarray, spec: StateSpec) -> None:
    known = (tokens >= 0) & (tokens < spec.config.vocab_size)
    assert known.all(), f"sampled token {tokens[~known][0]}, which the vocabulary has not"


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _work(request: ProgramRequest, cache: ProgramCache) -> str:
    first_run(request)
    return ""


if __name__ == "__main__":
    answer_requests(_work, "first run")
