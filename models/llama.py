"""Llama 3.x and the models that share its block: Mistral, SmolLM2, SmolLM3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from models.blocks.decoder import Decoder, DecoderConfig
from models.blocks.hf_config import HfConfig


class Model(Decoder):
    """Pre-norm decoder with grouped-query attention and a gated feed-forward block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Llama-style decoder; biases, NoPE layers and windows are switches of its relatives."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        fields = hf.decoder_fields()
        layers, rope = fields["num_layers"], hf.rope(fields["head_dim"])
        bias = hf.flag("attention_bias")
        interval = hf.integer("no_rope_layer_interval", layers + 1)  # SmolLM3: every fourth is NoPE
        rotated = hf.per_layer(
            "no_rope_layers", layers, [int((i + 1) % interval != 0) for i in range(layers)]
        )
        built = cls(
            **fields,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=hf.flag("mlp_bias"),
            windows=hf.windows(layers),
            ropes=tuple(rope if keep else None for keep in rotated),
        )
        hf.finish()
        return built
