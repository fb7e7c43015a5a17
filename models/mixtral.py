"""Mixtral: Mistral's attention with a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx

from models.blocks.decoder import Decoder, DecoderConfig
from models.blocks.experts import ExpertNames, Experts, ExpertsConfig
from models.blocks.hf_config import HfConfig
from models.blocks.parameters import Declare

NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


class Model(Decoder):
    """Pre-norm decoder whose layers choose among experts."""

    config: Config

    def make_feed_forward(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        norm = self.norm_spec(f"{prefix}post_attention_layernorm.weight")
        return Experts(self.config.experts, prefix, norm, declare, self.place, NAMES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Mixtral decoder."""

    experts: ExpertsConfig

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        fields = hf.decoder_fields()
        layers = fields["num_layers"]
        experts = ExpertsConfig(
            embed_dim=fields["embed_dim"],
            ffw_dim=fields["ffw_dim"],
            num_experts=hf.integer("num_local_experts"),
            per_token=hf.integer("num_experts_per_tok"),
            norm_eps=fields["norm_eps"],
            scoring="softmax",
            normalize=True,
            activation=fields["activation"],
        )
        built = cls(
            **fields,
            experts=experts,
            windows=hf.windows(layers),
            ropes=(hf.rope(fields["head_dim"], default_theta=1e6),) * layers,
        )
        hf.check_experts(experts)
        hf.finish()
        return built
