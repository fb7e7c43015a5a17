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
    save_pretrained writes: "sharded", "legacy" (config.json with the keys of transformers 4), "fp8"
    (block-scaled weights; the expectations are those of the dequantized ones) or "nested" (the
    text_config and language_model of a Kimi-K2.5 directory, beside a vision tensor).
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

QWEN2 = (
    Case("qwen2", "untied", "Qwen2Config", {}),
    Case("qwen2", "tied", "Qwen2Config", {"tie_word_embeddings": True, **_rope(1e6)}),
    Case(
        "qwen2",
        "window",  # the first max_window_layers layers are full
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        store="legacy",
    ),
    Case(
        "qwen2",
        "rope_yarn",
        "Qwen2Config",
        {"num_attention_heads": 2, **_rope(1e6, "yarn", **_YARN)},
    ),
)

_QWEN3 = {"head_dim": 12}
QWEN3 = (
    Case("qwen3", "untied", "Qwen3Config", _QWEN3),
    Case("qwen3", "tied", "Qwen3Config", {**_QWEN3, "tie_word_embeddings": True}),
    Case("qwen3", "bias", "Qwen3Config", {**_QWEN3, "attention_bias": True}),
    Case(
        "qwen3",
        "window",
        "Qwen3Config",
        {**_QWEN3, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
)

_QWEN3_MOE = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
QWEN3_MOE = (
    Case("qwen3_moe", "normalized", "Qwen3MoeConfig", _QWEN3_MOE),
    Case("qwen3_moe", "legacy_config", "Qwen3MoeConfig", _QWEN3_MOE, store="legacy"),
    Case("qwen3_moe", "unnormalized", "Qwen3MoeConfig", {**_QWEN3_MOE, "norm_topk_prob": False}),
    Case(
        "qwen3_moe",
        "sparse_step",  # layers 1 and 3 have experts
        "Qwen3MoeConfig",
        {**_QWEN3_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4, "num_experts": 4},
    ),
    Case(
        "qwen3_moe",
        "mlp_only_layers",
        "Qwen3MoeConfig",
        {**_QWEN3_MOE, "mlp_only_layers": [0], "tie_word_embeddings": True, "attention_bias": True},
    ),
    Case(
        "qwen3_moe",
        "one_expert_per_token",
        "Qwen3MoeConfig",
        {**_QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
)

_GEMMA3 = {
    "head_dim": 12,
    "tie_word_embeddings": True,
    "sliding_window": 16,
    "query_pre_attn_scalar": 12,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
GEMMA3 = (
    Case("gemma3", "local_global", "Gemma3TextConfig", _GEMMA3),
    Case("gemma3", "query_scale", "Gemma3TextConfig", {**_GEMMA3, "query_pre_attn_scalar": 40}),
    Case("gemma3", "rope_linear", "Gemma3TextConfig", {**_GEMMA3, "rope_parameters": _GEMMA3_ROPE}),
    Case("gemma3", "softcap", "Gemma3TextConfig", {**_GEMMA3, "final_logit_softcapping": 3.0}),
    Case("gemma3", "bias", "Gemma3TextConfig", {**_GEMMA3, "attention_bias": True}),
    Case("gemma3", "untied", "Gemma3TextConfig", {**_GEMMA3, "tie_word_embeddings": False}),
    Case("gemma3", "legacy_config", "Gemma3TextConfig", _GEMMA3, store="legacy"),
)

_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20}
MIXTRAL = (
    Case("mixtral", "full", "MixtralConfig", _MIXTRAL),
    Case(
        "mixtral",
        "window_head_dim",
        "MixtralConfig",
        {**_MIXTRAL, "sliding_window": 16, "head_dim": 12},
    ),
    Case(
        "mixtral",
        "three_of_five_tied",
        "MixtralConfig",
        {**_MIXTRAL, "num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
)

_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_DEEPSEEK_YARN = {
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    **_YARN,
}
DEEPSEEK_V3 = (
    Case("deepseek_v3", "grouped", "DeepseekV3Config", _DEEPSEEK),
    Case(
        "deepseek_v3", "one_group", "DeepseekV3Config", {**_DEEPSEEK, "n_group": 1, "topk_group": 1}
    ),
    Case("deepseek_v3", "no_query_rank", "DeepseekV3Config", {**_DEEPSEEK, "q_lora_rank": None}),
    Case(
        "deepseek_v3",
        "unnormalized_two_shared",
        "DeepseekV3Config",
        {**_DEEPSEEK, "norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    ),
    Case(
        "deepseek_v3", "all_experts", "DeepseekV3Config", {**_DEEPSEEK, "first_k_dense_replace": 0}
    ),
    Case("deepseek_v3", "all_dense", "DeepseekV3Config", {**_DEEPSEEK, "first_k_dense_replace": 2}),
    Case("deepseek_v3", "rope_halves", "DeepseekV3Config", {**_DEEPSEEK, "rope_interleave": False}),
    Case(
        "deepseek_v3",
        "rope_yarn",
        "DeepseekV3Config",
        {**_DEEPSEEK, **_rope(kind="yarn", **_DEEPSEEK_YARN)},
    ),
    Case("deepseek_v3", "bias", "DeepseekV3Config", {**_DEEPSEEK, "attention_bias": True}),
    Case("deepseek_v3", "fp8", "DeepseekV3Config", _DEEPSEEK, store="fp8"),
)

_KIMI_TEXT = {
    **_DEEPSEEK,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    **_rope(50000.0, "yarn", **{**_DEEPSEEK_YARN, "mscale_all_dim": 1.0}),
}
KIMI_K2 = (
    Case(
        "kimi_k2", "k2", "DeepseekV3Config", {**_KIMI_TEXT, "num_hidden_layers": 3}, store="legacy"
    ),
    Case("kimi_k2", "k25_text", "DeepseekV3Config", _KIMI_TEXT, store="nested"),
)

_MINIMAX = {
    "head_dim": 12,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
MINIMAX_M2 = (
    Case(
        "minimax_m2",
        "partial_rope",
        "MiniMaxM2Config",
        {**_MINIMAX, **_rope(5e6, partial_rotary_factor=2 / 3)},
    ),
    Case("minimax_m2", "full_rope", "MiniMaxM2Config", {**_MINIMAX, "num_experts_per_tok": 3}),
    Case(
        "minimax_m2",
        "legacy_config",  # rotary_dim, as the released checkpoints have it
        "MiniMaxM2Config",
        {**_MINIMAX, "tie_word_embeddings": True, **_rope(5e6, partial_rotary_factor=1 / 2)},
        store="legacy",
    ),
)

CASES = (
    *LLAMA,
    *MISTRAL,
    *SMOLLM3,
    *QWEN2,
    *QWEN3,
    *QWEN3_MOE,
    *GEMMA3,
    *MIXTRAL,
    *DEEPSEEK_V3,
    *KIMI_K2,
    *MINIMAX_M2,
)
