"""Gemma 3 (text): local and global layers, norms before and after each block, scaled embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.blocks import parameters
from models.blocks.attention import Attention, AttentionConfig, LayerStep, value
from models.blocks.decoder import Decoder, DecoderConfig
from models.blocks.feed_forward import FeedForward
from models.blocks.hf_config import HfConfig
from models.blocks.parameters import Declare
from models.blocks.rope import Rope
from polyjax.core.model import ParamSpec
from polyjax.core.op import Ops
from polyjax.core.ops import MATMUL, RMS_NORM


def one_plus(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Norm weights are stored as their difference from one; float32, or small ones would vanish."""
    return arrays[0].astype(np.float32) + 1.0


def norm_spec(name: str, size: int, axis: str = "embed") -> ParamSpec:
    """A norm weight [size] in float32."""
    return dataclasses.replace(parameters.vector(name, size, axis, pack=one_plus), dtype="float32")


class OnePlusAttention(Attention):
    """Attention whose head norms are stored like all others."""

    def head_norm_spec(self, name: str) -> ParamSpec:
        return norm_spec(name, self.config.head_dim, "head_dim")


class Layer(nnx.Module):
    """Attention and feed-forward, each between two norms."""

    def __init__(self, model: Model, layer: int, prefix: str, declare: Declare):
        c, place = model.config, model.place
        self.config, self.place = c, place
        norm = lambda name: norm_spec(f"{prefix}{name}.weight", c.embed_dim)  # noqa: E731
        self.attention = OnePlusAttention(
            c.attention(layer), prefix, norm("input_layernorm"), declare, place
        )
        self.feed_forward = FeedForward(
            c.feed_forward(), prefix, norm("pre_feedforward_layernorm"), declare, place
        )
        self.after_attention = declare(norm("post_attention_layernorm"))
        self.after_feed_forward = declare(norm("post_feedforward_layernorm"))

    def __call__(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [M,D], the layer's pool -> (x [M,D], updated pool)."""
        attention, feed_forward, eps = self.attention, self.feed_forward, self.config.norm_eps
        y, kv = attention.attend(ops, x, step, kv)
        y = ops(MATMUL, y, attention.output[...], value(attention.output_bias), None)
        x = x + ops(RMS_NORM, y, self.after_attention[...], eps=eps)
        y = ops(MATMUL, feed_forward.hidden(ops, x), feed_forward.down[...], None, None)
        x = x + ops(RMS_NORM, y, self.after_feed_forward[...], eps=eps)
        return self.place(x, "batch", "embed"), kv


class Model(Decoder):
    """Decoder with sandwich norms; the embedding is multiplied by sqrt(D)."""

    config: Config

    def norm_spec(self, name: str) -> ParamSpec:
        return norm_spec(name, self.config.embed_dim)

    def make_layer(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        return Layer(self, layer, prefix, declare)

    def embed(self, ops: Ops, tokens: jax.Array) -> jax.Array:
        x = super().embed(ops, tokens)
        # The factor is rounded to the model's dtype first, as the model was trained.
        return x * jnp.asarray(self.config.embed_dim**0.5, x.dtype)

    def head(self) -> tuple[jax.Array, jax.Array, Mapping[str, Any]]:
        norm, weight, static = super().head()
        cap = self.config.final_soft_cap
        return norm, weight, {**static, "soft_cap": cap} if cap else static


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Gemma 3 text decoder; 0 is no soft cap."""

    query_scale: float
    attention_soft_cap: float
    final_soft_cap: float

    def attention(self, layer: int) -> AttentionConfig:
        return dataclasses.replace(
            super().attention(layer), scale=self.query_scale, soft_cap=self.attention_soft_cap
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig({"tie_word_embeddings": True, **config})
        fields = hf.decoder_fields(activation="hidden_activation")
        bias = hf.flag("attention_bias")
        windows = _windows(hf, fields["num_layers"])
        rope_full, rope_local = _ropes(hf, fields["head_dim"])
        hf.one_of("use_bidirectional_attention", (False,), False)
        scale = hf.number("query_pre_attn_scalar", fields["head_dim"], minimum=1e-3)
        built = cls(
            **fields,
            head_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=windows,
            ropes=tuple(rope_local if window else rope_full for window in windows),
            query_scale=scale**-0.5,
            attention_soft_cap=hf.number("attn_logit_softcapping", 0.0),
            final_soft_cap=hf.number("final_logit_softcapping", 0.0),
        )
        hf.finish()
        return built


def _windows(hf: HfConfig, layers: int) -> tuple[int, ...]:
    """`layer_types`, or every `sliding_window_pattern`-th layer global."""
    if hf.get("layer_types") is None:
        every = hf.integer("sliding_window_pattern", hf.get("_sliding_window_pattern", 6))
        window = hf.integer("sliding_window")
        return tuple(0 if (i + 1) % every == 0 else window for i in range(layers))
    return hf.windows(layers)


def _ropes(hf: HfConfig, head_dim: int) -> tuple[Rope, Rope]:
    """Rotation of global layers and of local ones, which the scaling does not touch."""
    parameters = hf.get("rope_parameters", {})
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        return (
            hf.rope(head_dim, parameters["full_attention"], 1e6),
            hf.rope(head_dim, parameters.get("sliding_attention", {}), 1e4),
        )
    local = {"rope_theta": hf.number("rope_local_base_freq", 1e4)}
    return hf.rope(head_dim, default_theta=1e6), hf.rope(head_dim, local)
