"""The decoder every family is a variation of: its config, its layers, its step."""

from __future__ import annotations

import dataclasses
import sys
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
from polyjax.core.kv import KVGroup
from polyjax.core.mesh import ONE_DEVICE, Placement
from polyjax.core.model import KVState, ParamSpec, StepBatch
from polyjax.core.op import Ops, Workload
from polyjax.core.ops import DENSE_DECODE_GREEDY, DENSE_DECODE_STACK, EMBED, LM_HEAD


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

    def workloads(
        self, tokens: int, sequences: int, pages: int, page_size: int, dtype: str
    ) -> Iterator[Workload]:
        """Yields the workloads of one step, in order and with repeats."""
        yield from step_workloads(self, tokens, sequences, pages, page_size, dtype)


class Layer(nnx.Module):
    """Attention, then feed-forward; each norms the residual stream and adds to it."""

    def __init__(self, attention: nnx.Module, feed_forward: nnx.Module):
        self.attention, self.feed_forward = attention, feed_forward

    def __call__(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D], the layer's pool -> (x [M,D], updated pool)."""
        x, kv = self.attention(ops, x, step, kv)
        return self.feed_forward(ops, x), kv


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. A family overrides the `make_` methods."""

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
        self.layers: Any = nnx.List(
            self.make_layer(index, f"model.layers.{index}.", declare)
            for index in range(c.num_layers)
        )
        self.final_norm = declare(self.norm_spec("model.norm.weight"))
        head = parameters.matrix("lm_head.weight", c.vocab_size, c.embed_dim, table)
        self.lm_head = declare.optional(not c.tied_embeddings, head)

    def norm_spec(self, name: str) -> ParamSpec:
        """The weight of a norm over the residual stream."""
        return parameters.vector(name, self.config.embed_dim)

    def make_layer(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        return Layer(
            self.make_attention(layer, prefix, declare),
            self.make_feed_forward(layer, prefix, declare),
        )

    def make_attention(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        norm = self.norm_spec(f"{prefix}input_layernorm.weight")
        return Attention(self.config.attention(layer), prefix, norm, declare, self.place)

    def make_feed_forward(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        norm = self.norm_spec(f"{prefix}post_attention_layernorm.weight")
        return FeedForward(self.config.feed_forward(), prefix, norm, declare, self.place)

    def embed(self, ops: Ops, tokens: jax.Array) -> jax.Array:
        """tokens [M] -> the residual stream's start [M,D]."""
        return self.place(ops(EMBED, self.embedding[...], tokens), "batch", "embed")

    def __call__(self, ops: Ops, batch: StepBatch, kv: KVState) -> tuple[jax.Array, KVState]:
        """Returns (residual stream before the final norm [B,T,D], updated pools)."""
        x = self.embed(ops, batch.tokens.reshape(-1))
        if batch.tokens.shape[1] == 1 and self.is_plain_stack:
            x, kv = self._decode_stack(ops, x, batch, kv)
            return x[:, None], kv
        pools = list(kv)
        steps = layer_steps(self.config.kv_groups(), self.config.ropes, batch, kv)
        for index, (layer, step) in enumerate(zip(self.layers, steps, strict=True)):
            x, pools[index] = layer(ops, x, step, pools[index])
        return x.reshape(*batch.tokens.shape, -1), tuple(pools)

    @property
    def is_plain_stack(self) -> bool:
        """Whether one op, DENSE_DECODE_STACK, describes a decode step of all layers."""
        c = self.config
        switches = (c.qkv_bias, c.output_bias, c.mlp_bias, c.head_norm, *c.windows)
        plain = not any(switches) and c.activation == "silu"
        one_rope = len(set(c.ropes)) == 1 and c.ropes[0] is not None
        return (
            plain
            and one_rope
            and (self.place.plan is None or self.place.plan.num_devices == 1)
            and all(
                (type(layer), type(layer.attention), type(layer.feed_forward))
                == (Layer, Attention, FeedForward)
                for layer in self.layers
            )
        )

    def decode_greedy(
        self, ops: Ops, batch: StepBatch, kv: KVState
    ) -> tuple[jax.Array, jax.Array, KVState] | None:
        """See core.model.Model; a plan may fuse the whole step into one kernel."""
        norm, weight, static = self.head()
        if not self.is_plain_stack or static != {"eps": self.config.norm_eps}:
            return None
        x = self.embed(ops, batch.tokens.reshape(-1))
        arguments, numbers = self._stack(x, batch, kv)
        result: tuple[jax.Array, jax.Array, KVState] = ops(
            DENSE_DECODE_GREEDY, *arguments, norm, weight, **numbers
        )
        return result

    def _decode_stack(
        self, ops: Ops, x: jax.Array, batch: StepBatch, kv: KVState
    ) -> tuple[jax.Array, KVState]:
        """x [B,D], one new token a row -> (x [B,D], updated pools); a plan may fuse all of it."""
        arguments, numbers = self._stack(x, batch, kv)
        result: tuple[jax.Array, KVState] = ops(DENSE_DECODE_STACK, *arguments, **numbers)
        return result

    def _stack(
        self, x: jax.Array, batch: StepBatch, kv: KVState
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of DENSE_DECODE_STACK, arrays and static ones."""
        attention = [layer.attention for layer in self.layers]
        feed_forward = [layer.feed_forward for layer in self.layers]
        arrays = lambda modules, name: tuple(getattr(m, name)[...] for m in modules)  # noqa: E731
        stack = (
            x,
            arrays(attention, "norm"),
            arrays(attention, "qkv"),
            arrays(attention, "output"),
            arrays(feed_forward, "norm"),
            arrays(feed_forward, "gate_up"),
            arrays(feed_forward, "down"),
            kv,
            self.config.ropes[0].cos_sin(batch.positions.reshape(-1)),
            batch.page_tables[0],
            jnp.where(batch.query_lens > 0, batch.context_lens, 0),
        )
        return stack, {"eps": self.config.norm_eps, "scale": self.config.attention(0).scale}

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


def model_of(config: Any) -> Callable[..., Any]:
    """The `Model` of the family whose `Config` this is: both are names of one module."""
    return sys.modules[type(config).__module__].Model


def step_workloads(
    config: Any, tokens: int, sequences: int, pages: int, page_size: int, dtype: str
) -> Iterator[Workload]:
    """Yields the workload of every op call of one step, head included, in order and with repeats.

    Found by tracing the model with shapes only, so a new family needs to list nothing. Composite
    ops are followed by the simpler ops their reference calls: a plan may choose kernels for either.
    """
    ops = Ops({}, {})

    def step(batch: StepBatch, kv: KVState) -> jax.Array:
        model = model_of(config)(config, dtype=dtype)
        x, _ = model(ops, batch, kv)
        norm, weight, static = model.head()
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
