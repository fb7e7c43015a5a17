"""DeepSeek-V3 and R1: latent attention, shared experts, sigmoid routing within groups.

Kimi-K2 has the same architecture and, in its own config.json, the same name. Block-scaled float8
weights are dequantized as they are read, before a family sees them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx

from models.blocks.decoder import Decoder, DecoderConfig
from models.blocks.experts import Experts, ExpertsConfig
from models.blocks.hf_config import HfConfig
from models.blocks.latent import LatentAttention, LatentConfig, latent_group
from models.blocks.parameters import Declare
from models.blocks.rope import Rope, yarn_mscale
from polyjax.core.kv import KVGroup


class Model(Decoder):
    """Pre-norm decoder with latent attention; all but the first layers choose among experts."""

    config: Config

    def make_attention(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        norm = self.norm_spec(f"{prefix}input_layernorm.weight")
        return LatentAttention(self.config.latent, prefix, norm, declare, self.place)

    def make_feed_forward(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        if layer < self.config.dense_layers:
            return super().make_feed_forward(layer, prefix, declare)
        norm = self.norm_spec(f"{prefix}post_attention_layernorm.weight")
        return Experts(self.config.experts, prefix, norm, declare, self.place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A DeepSeek-V3 decoder. `num_kv_heads` and `head_dim` play no part: the cache is a latent."""

    latent: LatentConfig
    experts: ExpertsConfig
    dense_layers: int

    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (latent_group(self.latent, self.num_layers),)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        fields = hf.decoder_fields()
        layers = fields["num_layers"]
        rope = hf.rope(hf.integer("qk_rope_head_dim"))
        latent, experts = _latent(hf, fields, rope), _experts(hf, fields)
        built = cls(
            **fields,
            latent=latent,
            experts=experts,
            dense_layers=hf.integer("first_k_dense_replace", 0, minimum=0),
            windows=(0,) * layers,
            ropes=(rope,) * layers,
        )
        hf.one_of("moe_layer_freq", (1,), 1)
        hf.check_experts(experts)
        hf.finish()
        return built


def _latent(hf: HfConfig, fields: Mapping[str, Any], rope: Rope) -> LatentConfig:
    nope_dim = hf.integer("qk_nope_head_dim")
    scale = (nope_dim + rope.dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:  # the temperature acts on query and key
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return LatentConfig(
        embed_dim=fields["embed_dim"],
        heads=fields["num_heads"],
        query_rank=0 if hf.get("q_lora_rank") is None else hf.integer("q_lora_rank"),
        rank=hf.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope.dim,
        value_dim=hf.integer("v_head_dim"),
        norm_eps=fields["norm_eps"],
        scale=scale,
        bias=hf.flag("attention_bias"),
        interleaved=hf.flag("rope_interleave", True),
    )


def _experts(hf: HfConfig, fields: Mapping[str, Any]) -> ExpertsConfig:
    ffw_dim = hf.integer("moe_intermediate_size")
    hf.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    return ExpertsConfig(
        embed_dim=fields["embed_dim"],
        ffw_dim=ffw_dim,
        num_experts=hf.integer("n_routed_experts"),
        per_token=hf.integer("num_experts_per_tok"),
        norm_eps=fields["norm_eps"],
        scoring=hf.one_of("scoring_func", ("sigmoid",), "sigmoid"),
        normalize=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        groups=hf.integer("n_group", 1),
        kept_groups=hf.integer("topk_group", 1),
        routing_bias=True,
        shared_dim=ffw_dim * hf.integer("n_shared_experts", 0, minimum=0),
        activation=fields["activation"],
    )
