"""Qwen3: Llama's block with a norm on every query and key head."""

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
    """A Qwen3 decoder; layers from `max_window_layers` on may have a sliding window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        built = cls(**qwen3_fields(hf))
        hf.finish()
        return built


def qwen3_fields(hf: HfConfig) -> dict[str, Any]:
    """The fields that dense and mixture-of-experts Qwen3 share."""
    fields = hf.decoder_fields()
    layers, bias = fields["num_layers"], hf.flag("attention_bias")
    return {
        **fields,
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "windows": hf.windows(layers, default_use=False),
        "ropes": (hf.rope(fields["head_dim"]),) * layers,
    }
