"""What config.json may say, must not say, and what follows from it before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

import models
from polyjax.core.errors import ModelError
from polyjax.core.mesh import MeshPlan
from polyjax.io.files import open_model
from tests.goldens import ROOT, golden_cases

LLAMA: Mapping[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config_of(architecture: str, changes: Mapping[str, Any]) -> Any:
    return models.family(architecture).Config.from_hf({**LLAMA, **changes})


def problems_of(architecture: str, changes: Mapping[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        config_of(architecture, changes)
    return "\n".join(error.value.problems)


def test_every_problem_is_listed_at_once() -> None:
    text = problems_of(
        "LlamaForCausalLM",
        {
            "vocab_size": None,
            "num_key_value_heads": 3,
            "hidden_act": "relu6",
            "rope_scaling": {"type": "longrope", "factor": 0.5},
            "attention_bias": "yes",
            "quantization_config": {"quant_method": "gptq"},
            "torch_dtype": "int8",
            "eos_token_id": "end",
            "num_hidden_layers": True,
            "rms_norm_eps": float("nan"),
        },
    )
    for name in (
        "vocab_size is missing",
        "num_key_value_heads=3",
        "hidden_act is 'relu6'",
        "rope_type is 'longrope'",
        "attention_bias is 'yes'",
        "'gptq'",
        "dtype is 'int8'",
        "eos_token_id is 'end'",
        "num_hidden_layers is True",
        "rms_norm_eps is nan",
    ):
        assert name in text


@pytest.mark.parametrize(
    "architecture, changes, problem",
    [
        ("LlamaForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers wants one entry for each"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0, wanted at least 1"),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "linear_attention"],
            },
            "layer_types has ['linear_attention']",
        ),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok=3 exceeds",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"n_routed_experts": 6, "n_group": 4, "scoring_func": "softmax"},
            "6 experts do not make 4 groups",
        ),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [0, 1]}, "attn_type_list has layers"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_value_is_named(
    architecture: str, changes: Mapping[str, Any], problem: str
) -> None:
    assert problem in problems_of(architecture, changes)


def test_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"'MambaForCausalLM' is not supported.*LlamaForCausalLM"):
        models.family("MambaForCausalLM")


def test_old_and_new_spellings_agree() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 32}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    spelled = [
        config_of("LlamaForCausalLM", {**old, "torch_dtype": "bfloat16", "eos_token_id": 3}),
        config_of("LlamaForCausalLM", {**new, "dtype": "bfloat16", "eos_token_id": [3]}),
    ]
    assert spelled[0] == spelled[1]
    assert spelled[0].ropes[0].kind == "llama3"


def test_scaled_rope_stretches_the_context() -> None:
    def context(kind: str, **more: Any) -> int:
        scaling = {"type": kind, "factor": 4.0, **more}
        return config_of("LlamaForCausalLM", {"rope_scaling": scaling}).max_context_tokens

    assert context("linear") == context("dynamic") == 256
    assert context("yarn", original_max_position_embeddings=32) == 128
    assert context("llama3", original_max_position_embeddings=16) == 64


def test_dynamic_rope_rotates_a_token_alike_in_every_step() -> None:
    import jax.numpy as jnp
    import numpy as np

    scaling = {"type": "dynamic", "factor": 4.0}
    rope = config_of("LlamaForCausalLM", {"rope_scaling": scaling}).ropes[0]
    whole = np.asarray(rope.cos_sin(jnp.arange(200)))
    np.testing.assert_array_equal(whole[150:], rope.cos_sin(jnp.arange(150, 200)))
    plain = config_of("LlamaForCausalLM", {}).ropes[0].cos_sin(jnp.arange(200))
    np.testing.assert_allclose(whole[:64], plain[:64], atol=1e-6)  # unscaled within its context
    # Past it the base is theta * (factor * length / original - factor + 1)^(dim / (dim - 2)).
    base = 1e4 * (4.0 * 200 / 64 - 3.0) ** (8 / 6)
    assert np.isclose(whole[199, 3], np.cos(199 * base ** (-6 / 8)), atol=1e-5)


@pytest.mark.parametrize("family, case", golden_cases())
def test_memory_is_what_the_checkpoint_loads_into(family: str, case: str) -> None:
    path = ROOT / family / case
    files = open_model(path)
    config = models.family(files.config["architectures"][0]).Config.from_hf(files.config)
    stored = sum(
        4 * math.prod(files.tensors.shape(name))
        for name in files.tensors.names()
        if not (config.tied_embeddings and name == "lm_head.weight")
    )
    found = models.memory(config, "float32")
    assert found.weight_bytes == stored
    assert found.kv_bytes(100) == _kv_bytes(json.loads((path / "config.json").read_text()), 100)


def _kv_bytes(raw: Mapping[str, Any], tokens: int) -> int:
    """What config.json says of the cache, read here without the families' help."""
    raw = {**raw, **raw.get("text_config", {})}
    layers = raw["num_hidden_layers"]
    if "kv_lora_rank" in raw:
        return 4 * layers * tokens * (raw["kv_lora_rank"] + raw["qk_rope_head_dim"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    kinds = raw.get("layer_types")
    if kinds is None and "sliding_window_pattern" in raw:
        every = raw["sliding_window_pattern"]
        kinds = ["full" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    if kinds is None:
        first = raw.get("max_window_layers", 0)
        kinds = ["sliding_attention" if i >= first else "full" for i in range(layers)]
    kept = [min(tokens, window) if window and k == "sliding_attention" else tokens for k in kinds]
    return 4 * 2 * raw["num_key_value_heads"] * head_dim * sum(kept)


def test_memory_is_shared_out_over_a_mesh() -> None:
    config = config_of("LlamaForCausalLM", {})
    whole, halves = models.memory(config), models.memory(config, plan=MeshPlan(model=2))
    norms = 4 * 32 * 5  # every device keeps them
    assert halves.weight_bytes == (whole.weight_bytes - norms) // 2 + norms
    assert halves.kv_bytes(10) * 2 == whole.kv_bytes(10)


def test_a_latent_is_on_every_device() -> None:
    files = open_model(ROOT / "deepseek_v3" / "grouped")
    config = models.family("DeepseekV3ForCausalLM").Config.from_hf(files.config)
    assert models.memory(config, plan=MeshPlan(model=2)).kv_bytes(7) == models.memory(
        config
    ).kv_bytes(7)
