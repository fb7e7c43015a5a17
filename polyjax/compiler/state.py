"""What lives on the devices across steps: its shapes, dtypes, shardings and sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import models
from polyjax.compiler.sampling import SamplingState
from polyjax.core.mesh import ONE_DEVICE, MeshPlan, Placement
from polyjax.core.model import KVGroup, ModelConfig

MAX_LOGIT_BIAS = 300  # entries a request may have; the limit of OpenAI's API
MAX_MASKED_ROWS = 1024  # more than sequences in a step


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """What determines the state's shapes. `num_pages` per KV group, sink and scratch included.

    The per-slot arrays have `num_slots` + 1 rows; the last is the sink of inactive rows.
    """

    config: ModelConfig
    dtype: str
    page_size: int
    num_pages: tuple[int, ...]
    num_slots: int
    scratch_pages: int

    @property
    def mask_words(self) -> int:
        """int32 words of a mask over the vocabulary."""
        return -(-self.config.vocab_size // 32)

    def score_mask_shape(self, rows: int) -> tuple[int, int]:
        """Shape of the mask of a SCORE program: of each row, or one for all where there are many.

        Sequences are few, and a grammar may constrain each; the many tokens of a prompt are free.
        """
        return (rows if rows <= MAX_MASKED_ROWS else 1), self.mask_words


@dataclasses.dataclass(frozen=True)
class StateAvals:
    """Shapes, dtypes and shardings of the state, as jax.ShapeDtypeStruct.

    params: the flat tuple of parameters, `param_names` in the same order. kv: a pool per layer.
    last_tokens [S] int32. sampling: what the full sampler keeps.
    """

    params: tuple[jax.ShapeDtypeStruct, ...]
    param_names: tuple[str, ...]
    kv: tuple[jax.ShapeDtypeStruct, ...]
    last_tokens: jax.ShapeDtypeStruct
    sampling: SamplingState


@functools.cache
def abstract_model(spec: StateSpec, place: Placement) -> models.AbstractModel:
    """The model of `spec` without its arrays; found once, it takes a second for a large model."""
    return models.abstract(spec.config, spec.dtype, place)


@functools.cache
def state_avals(spec: StateSpec, mesh_plan: MeshPlan, mesh: Mesh) -> StateAvals:
    """Returns the avals of the state that `spec` describes, laid over `mesh` by `mesh_plan`."""

    def aval(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        sharding = mesh_plan.sharding(mesh, axes or (None,) * len(shape))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    abstract = abstract_model(spec, Placement(mesh_plan, mesh))
    params = tuple(
        aval(tuple(p.shape), p.dtype or spec.dtype, *p.axes) for p in abstract.specs.values()
    )
    groups = layer_groups(spec.config)
    kv = tuple(
        aval(
            (spec.num_pages[index], *group.page_shape(spec.page_size)),
            spec.dtype,
            *group.axes,
        )
        for index, group in groups
    )
    rows, vocab = spec.num_slots + 1, spec.config.vocab_size
    sampling = SamplingState(
        output_counts=aval((rows, vocab), "int32"),
        prompt_seen=aval((rows, vocab), "bool"),
        bias_ids=aval((rows, MAX_LOGIT_BIAS), "int32"),
        bias_values=aval((rows, MAX_LOGIT_BIAS), "float32"),
    )
    last_tokens = aval((rows,), "int32")
    return StateAvals(params, tuple(abstract.specs), kv, last_tokens, sampling)


@functools.cache
def head_indices(spec: StateSpec) -> tuple[int, ...]:
    """Positions in the flat tuple of the parameters that the model's head reads."""
    abstract = abstract_model(spec, ONE_DEVICE)
    avals = tuple(
        jax.ShapeDtypeStruct(tuple(p.shape), jnp.dtype(p.dtype or spec.dtype))
        for p in abstract.specs.values()
    )
    jaxpr = jax.make_jaxpr(lambda flat: abstract.merge(flat).head()[:2])(avals).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return tuple(index for index, v in enumerate(jaxpr.invars) if id(v) in read)


def layer_groups(config: ModelConfig) -> list[tuple[int, KVGroup]]:
    """Per layer, in order: the index of its KV group and the group."""
    of_layer = {
        layer: (index, group)
        for index, group in enumerate(config.kv_groups())
        for layer in group.layers
    }
    return [of_layer[layer] for layer in sorted(of_layer)]


def page_bytes(config: ModelConfig, page_size: int, dtype: str) -> list[int]:
    """Bytes of one page of each KV group, over all of its layers."""
    itemsize = jnp.dtype(dtype).itemsize
    return [
        len(group.layers) * math.prod(group.page_shape(page_size)) * itemsize
        for group in config.kv_groups()
    ]
