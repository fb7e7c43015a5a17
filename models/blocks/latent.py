"""Multi-head latent attention (DeepSeek-V2): one small latent per token is all that is cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.blocks import parameters
from models.blocks.attention import LayerStep, value
from models.blocks.parameters import Declare
from polyjax.core.kv import KVGroup
from polyjax.core.mesh import Placement
from polyjax.core.model import ParamSpec, Source
from polyjax.core.op import Ops
from polyjax.core.ops import (
    HEAD_MATMUL,
    LATENT_ATTENTION,
    LATENT_WRITE,
    MATMUL,
    RMS_NORM,
    ROPE,
)

LATENT_NORM_EPS = 1e-6  # the norms of the latents have their own, whatever rms_norm_eps says


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Static numbers of latent attention. `query_rank` 0 projects queries straight from x.

    `interleaved` says that the checkpoint rotates neighbouring pairs; packing brings them into
    halves.
    """

    embed_dim: int
    heads: int
    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    scale: float
    bias: bool = False
    interleaved: bool = True

    @property
    def cached_dim(self) -> int:
        """L: the latent and the rotated key."""
        return self.rank + self.rope_dim


@dataclasses.dataclass(frozen=True)
class PackLatents:
    """Projections into the latents (or their biases), stacked: query, kv latent, rotated key."""

    rope_dim: int
    interleaved: bool

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        *queries, latent = arrays
        split = latent.shape[0] - self.rope_dim
        rotated = rotation_halves(latent[split:]) if self.interleaved else latent[split:]
        return np.concatenate([*queries, latent[:split], rotated])


@dataclasses.dataclass(frozen=True)
class PackQueries:
    """Query projection [N*(nope+rope),...] -> [N,nope+rope,...] with its rotated rows in halves."""

    heads: int
    rope_dim: int
    interleaved: bool

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        rows = arrays[0].reshape(self.heads, -1, *arrays[0].shape[1:])
        if not self.interleaved:
            return rows
        split = rows.shape[1] - self.rope_dim
        rotated = [rotation_halves(head[split:]) for head in rows]
        return np.concatenate([rows[:, :split], np.stack(rotated)], axis=1)


def rotation_halves(rows: np.ndarray) -> np.ndarray:
    """Rows rotated in neighbouring pairs -> first members of every pair, then the second."""
    return np.concatenate([rows[0::2], rows[1::2]])


@dataclasses.dataclass(frozen=True)
class PackUp:
    """kv_b [N*(nope+value),rank] -> its key part [N,rank,nope] or its value part [N,value,rank]."""

    heads: int
    nope_dim: int
    keys: bool

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        per_head = arrays[0].reshape(self.heads, -1, arrays[0].shape[1])
        if self.keys:
            return np.ascontiguousarray(per_head[:, : self.nope_dim].transpose(0, 2, 1))
        return np.ascontiguousarray(per_head[:, self.nope_dim :])


class LatentAttention(nnx.Module):
    """Attention in the latent's space, added to the residual."""

    def __init__(
        self,
        config: LatentConfig,
        prefix: str,
        norm: ParamSpec,
        declare: Declare,
        place: Placement,
    ):
        c, attn = config, f"{prefix}self_attn."
        self.config, self.place = config, place
        self.norm = declare(norm)
        names = ["q_a_proj"] * (c.query_rank > 0) + ["kv_a_proj_with_mqa"]
        widths = [c.query_rank] * (c.query_rank > 0) + [c.cached_dim]
        pack = PackLatents(c.rope_dim, c.interleaved)
        self.down = declare(
            ParamSpec(
                (sum(widths), c.embed_dim),
                ("latent", "embed"),
                tuple(
                    Source(f"{attn}{name}.weight", (width, c.embed_dim))
                    for name, width in zip(names, widths, strict=True)
                ),
                pack,
            )
        )
        biases = tuple(Source(f"{attn}{n}.bias", (w,)) for n, w in zip(names, widths, strict=True))
        bias = ParamSpec((sum(widths),), ("latent",), biases, pack, "zeros")
        self.down_bias = declare.optional(c.bias, bias)
        query_norm = parameters.vector(f"{attn}q_a_layernorm.weight", c.query_rank, "latent")
        self.query_norm = declare.optional(c.query_rank > 0, query_norm)
        self.latent_norm = declare(
            parameters.vector(f"{attn}kv_a_layernorm.weight", c.rank, "latent")
        )
        self.query, self.key_up, self.value_up = map(declare, _head_specs(c, attn))
        self.output = declare(
            parameters.matrix(
                f"{attn}o_proj.weight", c.embed_dim, c.heads * c.value_dim, ("embed", "heads")
            )
        )
        bias = parameters.vector(f"{attn}o_proj.bias", c.embed_dim, init="zeros")
        self.output_bias = declare.optional(c.bias, bias)

    def __call__(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D] -> (x + attention [M,D], updated pool)."""
        c, batch = self.config, step.batch
        query, kv = self._query_and_write(ops, x, step, kv)
        out = ops(
            LATENT_ATTENTION,
            query.reshape(*batch.tokens.shape, c.heads, c.cached_dim),
            kv,
            step.page_table,
            batch.context_lens,
            batch.query_lens,
            scale=c.scale,
            rank=c.rank,
        )
        out = self.place(out.reshape(-1, c.heads, c.rank), "batch", "heads", "latent")
        out = ops(HEAD_MATMUL, out, self.value_up[...]).reshape(x.shape[0], -1)
        x = ops(MATMUL, out, self.output[...], value(self.output_bias), x)
        return self.place(x, "batch", "embed"), kv

    def _query_and_write(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D] -> (queries in the latent's space [M,N,L], pool with this step's latents)."""
        c = self.config
        y = ops(RMS_NORM, x, self.norm[...], eps=c.norm_eps)
        latents = ops(MATMUL, y, self.down[...], value(self.down_bias), None)
        split = (c.query_rank, c.query_rank + c.rank)
        query_latent, latent, rotated = jnp.split(latents, split, axis=-1)
        if self.query_norm is not None:
            y = ops(RMS_NORM, query_latent, self.query_norm[...], eps=LATENT_NORM_EPS)
        weight = self.query[...]
        query = ops(MATMUL, y, weight.reshape(-1, weight.shape[-1]), None, None)
        query = query.reshape(x.shape[0], c.heads, c.nope_dim + c.rope_dim)
        query = self.place(query, "batch", "heads", None)
        in_latent = ops(HEAD_MATMUL, query[..., : c.nope_dim], self.key_up[...])
        query_rotated, rotated = query[..., c.nope_dim :], rotated[:, None]
        if step.cos_sin is not None:
            query_rotated = ops(ROPE, query_rotated, step.cos_sin)
            rotated = ops(ROPE, rotated, step.cos_sin)
        latent = ops(RMS_NORM, latent, self.latent_norm[...], eps=LATENT_NORM_EPS)
        cached = jnp.concatenate([latent, rotated[:, 0]], axis=-1)
        kv = self.place(ops(LATENT_WRITE, kv, cached, step.slots), *LATENT_AXES)
        return jnp.concatenate([in_latent, query_rotated], axis=-1), kv


LATENT_AXES = ("pages", None, None, None, "latent")
"""Every device keeps the whole latent: all heads read it."""


def latent_group(config: LatentConfig, layers: int) -> KVGroup:
    """The cache of `layers` layers of latent attention."""
    return KVGroup("latent", tuple(range(layers)), 1, config.cached_dim, planes=1, axes=LATENT_AXES)


def _head_specs(c: LatentConfig, attn: str) -> tuple[ParamSpec, ParamSpec, ParamSpec]:
    """Queries [N,nope+rope,rank or D], keys [N,rank,nope], values [N,value,rank]."""
    query_dim = c.nope_dim + c.rope_dim
    source, columns = ("q_b_proj", c.query_rank) if c.query_rank else ("q_proj", c.embed_dim)
    up = (Source(f"{attn}kv_b_proj.weight", (c.heads * (c.nope_dim + c.value_dim), c.rank)),)
    axes = ("heads", None, "latent")
    return (
        ParamSpec(
            (c.heads, query_dim, columns),
            ("heads", None, "latent" if c.query_rank else "embed"),
            (Source(f"{attn}{source}.weight", (c.heads * query_dim, columns)),),
            PackQueries(c.heads, c.rope_dim, c.interleaved),
        ),
        ParamSpec(
            (c.heads, c.rank, c.nope_dim),
            ("heads", "latent", None),
            up,
            PackUp(c.heads, c.nope_dim, keys=True),
        ),
        ParamSpec(
            (c.heads, c.value_dim, c.rank), axes, up, PackUp(c.heads, c.nope_dim, keys=False)
        ),
    )
