"""What a model family declares: parameters, KV groups, the step's inputs and the forward function.

A family is one file in `models/` with two names: `Config` (a frozen `ModelConfig` made from a
Hugging Face config.json) and `Model` (a Flax NNX module built of `nnx.Param`s, each carrying its
`ParamSpec`). Shapes, logical axes, checkpoint names and packing are declared once, in the
ParamSpec; initialisation, loading and sharding derive from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from polyjax.core.kv import KVGroup as KVGroup
from polyjax.core.op import Ops, Workload

Pack = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Source:
    """One checkpoint tensor a parameter is made of: its Hugging Face name and shape there."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter in the packed layout.

    `shape` and `axes` (logical axis names, None where unsharded) have equal length. `pack` turns
    the arrays of `sources`, in order, into an array of `shape`. `init` is "normal" (std 0.02),
    "ones" or "zeros" for random weights. `dtype` None means the model's dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    pack: Pack
    init: str = "normal"
    dtype: str | None = None


class ModelConfig(Protocol):
    """What every family's frozen `Config` offers."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""

    def kv_groups(self) -> tuple[KVGroup, ...]: ...

    def workloads(
        self, tokens: int, sequences: int, pages: int, page_size: int, dtype: str
    ) -> Iterator[Workload]:
        """Yields the workloads of one step, for benches and search."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The inputs of one forward program, bucket (T tokens, B sequences, C pages).

    tokens [B,T] int32, padded rows and tails with 0. query_lens [B]: new tokens of each row, 0 for
    an inactive row. context_lens [B]: tokens in the cache after this step, so the first new token
    sits at position context_lens - query_lens. page_tables: per KV group [B,C] int32 page ids, 0
    (the sink page) where unused. first_pages: per KV group [B] int32, the logical page index of
    column 0 (always 0 for a group without window).
    """

    tokens: jax.Array
    query_lens: jax.Array
    context_lens: jax.Array
    page_tables: tuple[jax.Array, ...]
    first_pages: tuple[jax.Array, ...]

    @property
    def positions(self) -> jax.Array:
        """[B,T] int32 positions of the new tokens; padding gets position 0."""
        offsets = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :]
        start = (self.context_lens - self.query_lens)[:, None]
        return jnp.where(offsets < self.query_lens[:, None], start + offsets, 0)

    def write_slots(self, group: int, page_size: int) -> jax.Array:
        """[B*T] int32 flat cache slots (page * page_size + offset) of the new tokens; padding 0."""
        offsets = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :]
        live = offsets < self.query_lens[:, None]
        position = self.positions
        column = position // page_size - self.first_pages[group][:, None]
        column = jnp.clip(column, 0, self.page_tables[group].shape[1] - 1)
        page = jnp.take_along_axis(self.page_tables[group], column, axis=1)
        return jnp.where(live, page * page_size + position % page_size, 0).reshape(-1)


KVState = tuple[jax.Array, ...]
"""One pool array per layer, [P, planes, heads, Z, head_dim], in layer order. Donated every step."""


class Model(Protocol):
    """What every family's `Model(nnx.Module)` offers.

    `Model(config, dtype=..., place=...)` builds it, always under `nnx.eval_shape`, so that no
    memory is touched; `place` fixes how activations lie on a mesh. Each `nnx.Param` carries its
    `spec: ParamSpec` as metadata.
    """

    def __call__(self, ops: Ops, batch: StepBatch, kv: KVState) -> tuple[jax.Array, KVState]:
        """Returns (residual stream before the final norm [B,T,D], updated pools)."""

    def decode_greedy(
        self, ops: Ops, batch: StepBatch, kv: KVState
    ) -> tuple[jax.Array, jax.Array, KVState] | None:
        """One new token a row and the most likely next one as one op, so that a plan may fuse them.

        Returns (tokens [B], residual stream before the final norm [B,D], updated pools), or None
        where no such op describes the family.
        """

    def head(self) -> tuple[jax.Array, jax.Array, Mapping[str, Any]]:
        """Returns (final norm weight [D], LM head weight [V,D], static arguments of LM_HEAD)."""
