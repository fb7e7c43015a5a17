"""Grouped-query attention over a paged KV group."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from models.blocks import parameters
from models.blocks.parameters import Declare
from polyjax.core.kv import KVGroup
from polyjax.core.mesh import Placement
from polyjax.core.model import ParamSpec, StepBatch
from polyjax.core.op import Ops
from polyjax.core.ops import MATMUL, NORM_QKV_ROPE_WRITE, PAGED_ATTENTION


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """What a layer needs of the step: its KV group's page table and slots, and the rotary table.

    `cos_sin` [M,R] is None where no position is rotated (NoPE), `first_pages` where the group keeps
    the whole context.
    """

    batch: StepBatch
    page_table: jax.Array
    first_pages: jax.Array | None
    slots: jax.Array
    cos_sin: jax.Array | None


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Static numbers of one attention layer. `window` 0 sees the whole context."""

    embed_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False


class Attention(nnx.Module):
    """Norm, QKV, rotation, cache write, attention and output projection, added to the residual."""

    def __init__(
        self,
        config: AttentionConfig,
        prefix: str,
        norm: ParamSpec,
        declare: Declare,
        place: Placement,
    ):
        c, attn = config, f"{prefix}self_attn."
        self.config, self.place = config, place
        width = c.heads * c.head_dim
        self.norm = declare(norm)
        self.qkv = declare(parameters.qkv(attn, c.heads, c.kv_heads, c.head_dim, c.embed_dim))
        self.output = declare(
            parameters.matrix(f"{attn}o_proj.weight", c.embed_dim, width, ("embed", "heads"))
        )
        bias = parameters.qkv_bias(attn, c.heads, c.kv_heads, c.head_dim)
        self.qkv_bias = declare.optional(c.qkv_bias, bias)
        bias = parameters.vector(f"{attn}o_proj.bias", c.embed_dim, init="zeros")
        self.output_bias = declare.optional(c.output_bias, bias)
        names = (f"{attn}{name}.weight" for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (
            declare.optional(c.head_norm, self.head_norm_spec(name)) for name in names
        )

    def head_norm_spec(self, name: str) -> ParamSpec:
        """The weight of a norm over one head of queries or keys."""
        return parameters.vector(name, self.config.head_dim, "head_dim")

    def __call__(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D] -> (x + attention [M,D], updated pool)."""
        attended, kv = self.attend(ops, x, step, kv)
        x = ops(MATMUL, attended, self.output[...], value(self.output_bias), x)
        return self.place(x, "batch", "embed"), kv

    def attend(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D] -> (attention before the output projection [M,N*H], updated pool)."""
        c, batch = self.config, step.batch
        q, kv = self.query_and_write(ops, x, step, kv)
        kv = self.place(kv, *KVGroup.axes)
        q = self.place(q, "batch", "heads", "head_dim")
        out = ops(
            PAGED_ATTENTION,
            q.reshape(*batch.tokens.shape, c.heads, c.head_dim),
            kv,
            step.page_table,
            batch.context_lens,
            batch.query_lens,
            step.first_pages,
            scale=c.scale,
            window=c.window,
            soft_cap=c.soft_cap,
        )
        out = out.reshape(x.shape[0], c.heads * c.head_dim)
        return self.place(out, "batch", "heads"), kv

    def query_and_write(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D] -> (rotated queries [M,N,H], pool with this step's keys and values)."""
        return ops(
            NORM_QKV_ROPE_WRITE,
            x,
            self.norm[...],
            self.qkv[...],
            value(self.qkv_bias),
            value(self.q_norm),
            value(self.k_norm),
            step.cos_sin,
            kv,
            step.slots,
            eps=self.config.norm_eps,
        )


def value(parameter: nnx.Param | None) -> jax.Array | None:
    """The array of a parameter that a config may leave out."""
    return None if parameter is None else parameter[...]
