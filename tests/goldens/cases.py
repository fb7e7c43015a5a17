"""The tiny checkpoints that parity is tested on: plain data for scripts/make_goldens.

Sizes are as small as a switch allows and differ from each other: a swapped axis must not pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 264  # 256 bytes, four special tokens, four that no tokenizer gives

BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 259,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: `changes` to BASE for `config_class`, a class name of transformers.

    `dtype` is how weights are stored. `store` names how the directory differs from what
    save_pretrained writes: "sharded", "legacy" (config.json with the keys of transformers 4) or
    "fp8" (block-scaled weights; the expectations are those of the dequantized ones).
    """

    family: str
    name: str
    config_class: str
    changes: Mapping[str, Any]
    dtype: str = "bfloat16"
    store: str = "plain"


def _rope(theta: float = 10000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **more}}


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def _llama(name: str, store: str = "plain", dtype: str = "bfloat16", **changes: Any) -> Case:
    return Case("llama", name, "LlamaConfig", {"head_dim": 8, **changes}, dtype, store)


LLAMA = (
    _llama("gqa", dtype="float32"),
    _llama("gqa_tied", tie_word_embeddings=True),
    _llama(
        "mha", num_attention_heads=8, num_key_value_heads=8, hidden_size=64, num_hidden_layers=1
    ),
    _llama("mha_tied", num_key_value_heads=4, tie_word_embeddings=True, rms_norm_eps=1e-3),
    _llama("mqa", num_key_value_heads=1),
    _llama("head_dim", head_dim=12),  # heads x head_dim is not hidden_size
    _llama("attention_bias", attention_bias=True),
    _llama("mlp_bias", mlp_bias=True),
    _llama("rope_theta", **_rope(500.0)),
    _llama("rope_linear", **_rope(kind="linear", factor=4.0)),
    _llama("rope_llama3", head_dim=16, **_rope(5000.0, "llama3", **_LLAMA3)),
    _llama(
        "rope_llama3_tied",
        head_dim=16,
        tie_word_embeddings=True,
        **_rope(5000.0, "llama3", **_LLAMA3),
    ),
    _llama("rope_yarn", head_dim=16, **_rope(kind="yarn", **_YARN)),
    _llama("legacy_config", store="legacy", **_rope(5000.0, "llama3", **_LLAMA3)),
    _llama("sharded", store="sharded", tie_word_embeddings=True),
)

_MISTRAL = {"head_dim": 8}
MISTRAL = (
    Case("mistral", "full", "MistralConfig", {**_MISTRAL, "sliding_window": None}),
    Case("mistral", "window", "MistralConfig", {**_MISTRAL, "sliding_window": 16}),
    Case(
        "mistral",
        "window_head_dim",
        "MistralConfig",
        {"head_dim": 12, "sliding_window": 9, "num_key_value_heads": 1, **_rope(1e6)},
    ),
)

_SMOLLM3 = {"num_hidden_layers": 4, "tie_word_embeddings": True, "intermediate_size": 40}
SMOLLM3 = (
    Case("smollm3", "nope", "SmolLM3Config", {**_SMOLLM3, "no_rope_layers": [1, 0, 1, 1]}),
    Case("smollm3", "nope_interval", "SmolLM3Config", {**_SMOLLM3, "no_rope_layer_interval": 2}),
    Case(
        "smollm3",
        "bias_untied",
        "SmolLM3Config",
        {
            **_SMOLLM3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 2,
            "no_rope_layers": [0, 1],
        },
    ),
    Case(
        "smollm3",
        "window",
        "SmolLM3Config",
        {
            **_SMOLLM3,
            "use_sliding_window": True,
            "sliding_window": 16,
            "num_hidden_layers": 2,
            "no_rope_layers": [1, 0],
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
)

CASES = (*LLAMA, *MISTRAL, *SMOLLM3)
