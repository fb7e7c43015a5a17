"""A small model with compiled step programs and a state of its own, to gate step programs on.

The twin has few pages and random weights; a program that passes here is then warmed on the live
pool. Weights, caches and batches are drawn anew for every seed; programs are compiled once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from polyjax.compiler.program import Kind, ProgramKey, ProgramRequest, StepProgram, compile_program
from polyjax.compiler.sampling import SamplingState
from polyjax.compiler.state import StateSpec, head_indices, state_avals
from polyjax.core.batch_layout import FROM_SLOT, SAMPLES, SAMPLING_FLOATS, BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.gates.paged_rows import PagedRows, paged_rows

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAGE_SIZE, NUM_PAGES, NUM_SLOTS, SCRATCH_PAGES = 4, 40, 6, 12
DECODE, PREFILL = Bucket(1, 4, 4), Bucket(6, 2, 4)
SCORE_ROWS = 12
KEYS = (
    ProgramKey(Kind.PREFILL, PREFILL),
    ProgramKey(Kind.DECODE_GREEDY, DECODE),
    ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, 4, 0)),
    ProgramKey(Kind.SCORE, Bucket(SCORE_ROWS, 1, 0)),
    ProgramKey(Kind.READ_SCRATCH),
)


def twin_spec(dtype: str = "float32") -> StateSpec:
    """What the twin's state consists of."""
    config = models.family("LlamaForCausalLM").Config.from_hf(HF_CONFIG)
    return StateSpec(config, dtype, PAGE_SIZE, (NUM_PAGES,), NUM_SLOTS, SCRATCH_PAGES)


@functools.cache
def reference_programs(spec: StateSpec) -> dict[ProgramKey, StepProgram]:
    """The twin's programs by the ops' references, compiled once a process."""
    mesh = MeshPlan().mesh()
    return {key: compile_program(ProgramRequest(spec, Plan(), key), mesh) for key in KEYS}


@dataclasses.dataclass
class TwinState:
    """The arrays of a state; programs consume some and hand new ones back."""

    params: tuple[jax.Array, ...]
    head: tuple[jax.Array, ...]
    kv: tuple[jax.Array, ...]
    last_tokens: jax.Array
    sampling: Any


@dataclasses.dataclass(frozen=True)
class HostState:
    """The same on the host: what a trial starts from as often as it likes."""

    spec: StateSpec
    params: tuple[np.ndarray, ...]
    kv: tuple[np.ndarray, ...]
    last_tokens: np.ndarray

    def on_device(self) -> TwinState:
        """Fresh device arrays."""
        copy = lambda a: jnp.array(a, copy=True)  # noqa: E731
        params = tuple(map(copy, self.params))
        avals = state_avals(self.spec, MeshPlan(), MeshPlan().mesh())
        sampling: SamplingState = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype), avals.sampling
        )
        head = tuple(params[i] for i in head_indices(self.spec))
        return TwinState(params, head, tuple(map(copy, self.kv)), copy(self.last_tokens), sampling)

    def with_unowned(self, owned: np.ndarray, value: float) -> HostState:
        """The state with `value` in every slot that is not owned [P,Z]."""
        mask = owned[:, None, None, :, None]
        kv = tuple(np.where(mask, pool, np.asarray(value, pool.dtype)) for pool in self.kv)
        return dataclasses.replace(self, kv=kv)


def random_state(spec: StateSpec, rng: np.random.Generator) -> HostState:
    """Random weights (norms near one), distinct numbers in every slot of the pools."""
    avals = state_avals(spec, MeshPlan(), MeshPlan().mesh())
    dtype = jnp.dtype(spec.dtype)
    params = []
    for name, aval in zip(avals.param_names, avals.params, strict=True):
        scale = 1 / np.sqrt(aval.shape[-1])
        values = rng.standard_normal(aval.shape)
        values = 1 + 0.2 * values if "norm" in name else values * scale
        params.append(values.astype(dtype))
    kv = tuple(rng.standard_normal(aval.shape).astype(dtype) for aval in avals.kv)
    last = rng.integers(0, spec.config.vocab_size, spec.num_slots + 1).astype(np.int32)
    return HostState(spec, tuple(params), kv, last)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's input: the flat array, and who owns what."""

    flat: np.ndarray
    rows: PagedRows
    slots: np.ndarray
    live: np.ndarray


def random_batch(spec: StateSpec, bucket: Bucket, rng: np.random.Generator, layout: str) -> Batch:
    """A batch of one page layout; decode rows take their token from their slot half of the time."""
    size = bucket.sequences
    spare = spec.num_pages[0] - 1 - size * bucket.pages
    rows = paged_rows(rng, layout, size, bucket.tokens, bucket.pages, spec.page_size, spare=spare)
    flat = np.zeros(BatchLayout(bucket, 1).size, np.int32)
    batch = BatchLayout(bucket, 1).split(flat)
    live = rows.query_lens > 0
    slots = rng.permutation(spec.num_slots)[:size]
    batch.slots[:] = np.where(live, slots, spec.num_slots)
    batch.tokens[:] = rng.integers(0, spec.config.vocab_size, batch.tokens.shape)
    batch.query_lens[:], batch.context_lens[:] = rows.query_lens, rows.context_lens
    batch.page_tables[0] = rows.page_table
    from_slot = (bucket.tokens == 1) & (rng.random(size) < 0.5)
    batch.flags[:] = np.where(live, SAMPLES + FROM_SLOT * from_slot, 0)
    ones = np.array([float(n in ("top_p", "repetition_penalty")) for n in SAMPLING_FLOATS])
    batch.sampling_floats[:] = ones.astype(np.float32).view(np.int32)
    return Batch(flat, rows, np.where(live, slots, spec.num_slots), live)
