"""The decoder every family is a variation of: its config, its layers, its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.blocks import parameters
from models.blocks.attention import Attention, AttentionConfig, LayerStep
from models.blocks.feed_forward import FeedForward, FeedForwardConfig
from models.blocks.parameters import Declare
from models.blocks.rope import Rope
from polyjax.core.mesh import ONE_DEVICE, Placement
from polyjax.core.model import KVGroup, KVState, StepBatch
from polyjax.core.op import Ops, Workload
from polyjax.core.ops import EMBED


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Numbers of a decoder with grouped-query attention; families add their own.

    `windows` holds a layer's sliding window in tokens, 0 for the whole context. `ropes` holds a
    layer's rotary embedding, None where positions are not rotated.
    """

    vocab_size: int
    embed_dim: int
    ffw_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    windows: tuple[int, ...]
    ropes: tuple[Rope | None, ...]
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """One group for the layers that keep everything, one for each window length."""
        groups = []
        for window in sorted(set(self.windows)):
            layers = tuple(i for i, w in enumerate(self.windows) if w == window)
            name = f"window_{window}" if window else "full"
            groups.append(KVGroup(name, layers, self.num_kv_heads, self.head_dim, window=window))
        return tuple(groups)

    def attention(self, layer: int) -> AttentionConfig:
        return AttentionConfig(
            embed_dim=self.embed_dim,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            head_norm=self.head_norm,
        )

    def feed_forward(self) -> FeedForwardConfig:
        return FeedForwardConfig(
            self.embed_dim, self.ffw_dim, self.norm_eps, self.activation, self.mlp_bias
        )


class Layer(nnx.Module):
    """Attention, then feed-forward, each on the normed residual stream."""

    def __init__(self, config: DecoderConfig, index: int, declare: Declare, place: Placement):
        prefix = f"model.layers.{index}."
        self.attention = Attention(
            config.attention(index), prefix, f"{prefix}input_layernorm.weight", declare, place
        )
        self.feed_forward = FeedForward(
            config.feed_forward(),
            prefix,
            f"{prefix}post_attention_layernorm.weight",
            declare,
            place,
        )

    def __call__(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D], the layer's pool -> (x [M,D], updated pool)."""
        x, kv = self.attention(ops, x, step, kv)
        return self.feed_forward(ops, x), kv


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. A family overrides `make_layer`, seldom more."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: str = "float32",
        place: Placement = ONE_DEVICE,
    ):
        c, declare = config, Declare(dtype)
        self.config, self.place = config, place
        table = ("vocab", "embed")
        self.embedding = declare(
            parameters.matrix("model.embed_tokens.weight", c.vocab_size, c.embed_dim, table)
        )
        self.layers = nnx.List(
            [self.make_layer(index, declare, place) for index in range(c.num_layers)]
        )
        self.final_norm = declare(parameters.vector("model.norm.weight", c.embed_dim))
        self.lm_head = (
            None
            if c.tied_embeddings
            else declare(parameters.matrix("lm_head.weight", c.vocab_size, c.embed_dim, table))
        )

    def make_layer(self, index: int, declare: Declare, place: Placement) -> nnx.Module:
        return Layer(self.config, index, declare, place)

    def embed(self, ops: Ops, tokens: jax.Array) -> jax.Array:
        """tokens [M] -> the residual stream's start [M,D]."""
        return self.place(ops(EMBED, self.embedding[...], tokens), "batch", "embed")

    def __call__(self, ops: Ops, batch: StepBatch, kv: KVState) -> tuple[jax.Array, KVState]:
        """Returns (residual stream before the final norm [B,T,D], updated pools)."""
        x = self.embed(ops, batch.tokens.reshape(-1))
        pools = list(kv)
        steps = layer_steps(self.config.kv_groups(), self.config.ropes, batch, kv)
        for index, (layer, step) in enumerate(zip(self.layers, steps, strict=True)):
            x, pools[index] = layer(ops, x, step, pools[index])
        return x.reshape(*batch.tokens.shape, -1), tuple(pools)

    def head(self) -> tuple[jax.Array, jax.Array, Mapping[str, Any]]:
        """Returns (final norm weight [D], LM head weight [V,D], static arguments of LM_HEAD)."""
        weight = self.embedding if self.lm_head is None else self.lm_head
        return self.final_norm[...], weight[...], {"eps": self.config.norm_eps}


def layer_steps(
    groups: tuple[KVGroup, ...], ropes: tuple[Rope | None, ...], batch: StepBatch, kv: KVState
) -> list[LayerStep]:
    """Returns each layer's view of the step; what layers share is computed once."""
    positions = batch.positions.reshape(-1)
    tables = {rope: rope.cos_sin(positions) for rope in dict.fromkeys(ropes) if rope is not None}
    steps: list[LayerStep] = [None] * len(ropes)  # type: ignore[list-item]  # filled just below
    for number, group in enumerate(groups):
        page_size = kv[group.layers[0]].shape[3]
        slots = batch.write_slots(number, page_size)
        first_pages = batch.first_pages[number] if group.window else None
        for layer in group.layers:
            rope = ropes[layer]
            steps[layer] = LayerStep(
                batch,
                batch.page_tables[number],
                first_pages,
                slots,
                None if rope is None else tables[rope],
            )
    return steps


def step_workloads(
    model: Callable[..., Any],
    config: Any,
    tokens: int,
    sequences: int,
    pages: int,
    page_size: int,
    dtype: str,
) -> Iterator[Workload]:
    """Yields the workload of every op call of one step, head included, in order and with repeats.

    Found by tracing the model with shapes only, so a new family needs to list nothing. Composite
    ops are followed by the simpler ops their reference calls: a plan may choose kernels for either.
    """
    from polyjax.core.ops import LM_HEAD

    ops = Ops({}, {})

    def step(batch: StepBatch, kv: KVState) -> jax.Array:
        built = model(config, dtype=dtype)
        x, _ = built(ops, batch, kv)
        norm, weight, static = built.head()
        return ops(LM_HEAD, x[:, -1], norm, weight, **static)

    jax.eval_shape(step, *abstract_step(config, tokens, sequences, pages, page_size, dtype))
    yield from (workload for workload, _ in ops.used)


def abstract_step(
    config: Any, tokens: int, sequences: int, pages: int, page_size: int, dtype: str
) -> tuple[StepBatch, KVState]:
    """Shapes and dtypes of a step's inputs and of pools just large enough for it."""
    ints: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    groups = config.kv_groups()
    batch = StepBatch(
        tokens=ints(sequences, tokens),
        query_lens=ints(sequences),
        context_lens=ints(sequences),
        page_tables=tuple(ints(sequences, pages) for _ in groups),
        first_pages=tuple(ints(sequences) for _ in groups),
    )
    shapes = {
        layer: (sequences * pages + 1, *group.page_shape(page_size))
        for group in groups
        for layer in group.layers
    }
    pools: Any = [jax.ShapeDtypeStruct(shapes[i], jnp.dtype(dtype)) for i in range(len(shapes))]
    return batch, tuple(pools)
