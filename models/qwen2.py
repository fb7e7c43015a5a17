"""Qwen2 and Qwen2.5: Llama's block with biases on queries, keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from models.blocks.decoder import Decoder, DecoderConfig
from models.blocks.hf_config import HfConfig


class Model(Decoder):
    """Pre-norm decoder; nothing differs from the base but what the config says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A Qwen2 decoder; layers from `max_window_layers` on may have a sliding window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        fields = hf.decoder_fields()
        layers = fields["num_layers"]
        built = cls(
            **fields,
            qkv_bias=True,
            windows=hf.windows(layers, default_use=False),
            ropes=(hf.rope(fields["head_dim"]),) * layers,
        )
        hf.finish()
        return built
