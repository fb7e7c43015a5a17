"""Qwen3-MoE: Qwen3's attention with a mixture of experts in most layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx

from models.blocks.decoder import Decoder
from models.blocks.experts import Experts, ExpertsConfig
from models.blocks.hf_config import HfConfig
from models.blocks.parameters import Declare
from models.qwen3 import Config as Qwen3Config
from models.qwen3 import qwen3_fields


class Model(Decoder):
    """Pre-norm decoder whose sparse layers choose among experts."""

    config: Config

    def make_feed_forward(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        if layer not in self.config.sparse_layers:
            return super().make_feed_forward(layer, prefix, declare)
        norm = self.norm_spec(f"{prefix}post_attention_layernorm.weight")
        return Experts(self.config.experts, prefix, norm, declare, self.place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Qwen3Config):
    """A Qwen3 decoder with experts in `sparse_layers`."""

    experts: ExpertsConfig
    sparse_layers: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        fields = qwen3_fields(hf)
        step = hf.integer("decoder_sparse_step", 1)
        dense = hf.integers("mlp_only_layers")
        sparse = [i for i in range(fields["num_layers"]) if i not in dense and (i + 1) % step == 0]
        experts = ExpertsConfig(
            embed_dim=fields["embed_dim"],
            ffw_dim=hf.integer("moe_intermediate_size"),
            num_experts=hf.integer("num_local_experts", hf.get("num_experts")),
            per_token=hf.integer("num_experts_per_tok"),
            norm_eps=fields["norm_eps"],
            scoring="softmax",
            normalize=hf.flag("norm_topk_prob"),
            activation=fields["activation"],
        )
        built = cls(**fields, experts=experts, sparse_layers=tuple(sparse))
        hf.check_experts(experts)
        hf.finish()
        return built
