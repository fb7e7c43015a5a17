"""A GGUF file seen as a Hugging Face model: its config keys, tensor names and shapes.

What GGUF does differently (facts of llama.cpp's converter): rows of Q and K of the llama
architecture are stored pairwise interleaved for its rotary embedding; Gemma's norm weights are
stored with their +1 already added; Llama 3's rope scaling is stored as a tensor of factors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyjax.core.errors import ModelError
from polyjax.io.files import ModelFiles
from polyjax.io.gguf import GGUFFile, read_gguf

Edit = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """How one GGUF architecture maps to Hugging Face."""

    hf_name: str
    model_type: str
    activation: str = "silu"
    permuted: bool = False  # Q and K rows interleaved
    norm_plus_one: bool = False
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)  # beyond _LAYER_TENSORS


_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", tensors=_QK_NORM),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        activation="gelu_pytorch_tanh",
        norm_plus_one=True,
        tensors={
            **_QK_NORM,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")


def open_gguf(path: Path, name: str | None = None) -> ModelFiles:
    """Opens a GGUF file. Raises ModelError listing what of it cannot be served."""
    from polyjax.io.gguf_tokenizer import build_tokenizer, tokenizer_config

    file = read_gguf(path)
    config = hf_config(file)
    settings = tokenizer_config(file.metadata)
    templates = {
        "default" if key == "tokenizer.chat_template" else key.rpartition(".")[2]: value
        for key, value in file.metadata.items()
        if re.fullmatch(r"tokenizer\.chat_template(\.\w+)?", key)
    }
    return ModelFiles(
        name=name or path.stem,
        path=path,
        config=config,
        generation_config=_generation_config(config),
        tokenizer_config=settings,
        chat_templates=templates,
        open_tensors=lambda: GGUFTensors(file, config),
        open_tokenizer=lambda: build_tokenizer(file.metadata, str(path)),
    )


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _architecture(file: GGUFFile) -> _Architecture:
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        problem = f"GGUF architecture {name!r} cannot be read ({known} can); use safetensors"
        raise ModelError(str(file.path), [problem])
    return _ARCHITECTURES[name]


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Returns what config.json would hold. Raises ModelError listing every missing metadata key."""
    architecture = _architecture(file)
    metadata = file.metadata
    prefix = metadata["general.architecture"]
    missing: list[str] = []

    def need(key: str) -> Any:
        if f"{prefix}.{key}" not in metadata:
            missing.append(f"metadata key {prefix}.{key} is missing")
        return metadata.get(f"{prefix}.{key}", 1)

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{prefix}.{key}", default)

    heads = need("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_name],
        "model_type": architecture.model_type,
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", need("embedding_length") // heads),
        "intermediate_size": need("feed_forward_length"),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": need("context_length"),
        # float32 in the file; its shortest decimal is what config.json says: 1e-05
        "rms_norm_eps": float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
        "hidden_act": architecture.activation,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if missing:
        raise ModelError(str(file.path), missing)
    scaling = _rope_scaling(file, get)
    if scaling:
        config["rope_scaling"] = scaling
    if prefix == "gemma3":
        config.update(_gemma3_config(config, get))
    return config


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(str(file.path), ["tensor token_embd.weight is missing"])
    return embedding.shape[0]


def _eos_token_ids(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """The end of text and, where it is another token, the end of a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = list(dict.fromkeys(metadata[key] for key in keys if key in metadata))
    return ids[0] if len(ids) == 1 else ids or None


def _gemma3_config(config: Mapping[str, Any], get: Callable[..., Any]) -> dict[str, Any]:
    """Keys of Gemma3TextConfig. Every sixth layer is global (Gemma 3 report, section 2.1)."""
    layers = config["num_hidden_layers"]
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    return {
        "hidden_activation": config["hidden_act"],
        "rope_theta": float(get("rope.freq_base", 1e6)),
        "rope_local_base_freq": float(get("rope.freq_base_swa", 1e4)),
        "sliding_window": get("attention.sliding_window", 1024),
        "layer_types": kinds,
        "query_pre_attn_scalar": config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _rope_scaling(file: GGUFFile, get: Callable[..., Any]) -> dict[str, Any] | None:
    kind, factor = get("rope.scaling.type"), float(get("rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind not in (None, "none"):
        raise ModelError(str(file.path), [f"rope scaling {kind!r} cannot be read from GGUF"])
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = file.read(_ROPE_FACTORS).reshape(-1)
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_rope_factors(scaling, len(factors), float(get("rope.freq_base", 10000.0)))
    if not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(str(file.path), [f"{_ROPE_FACTORS} is not Llama 3's scaling"])
    return scaling


def llama3_rope_factors(
    scaling: Mapping[str, Any], num_frequencies: int, theta: float
) -> np.ndarray:
    """Returns [H/2] float64, what each rotary frequency is divided by (Llama 3.1's scaling rule).

    Wavelengths beyond context/low are slowed by `factor`, those below context/high stay, and those
    between are interpolated.
    """
    frequencies = theta ** -(np.arange(num_frequencies) / num_frequencies)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)


class GGUFTensors:
    """A `TensorReader` under Hugging Face names; everything reads as float32.

    Raises ModelError on construction, listing tensors whose name has no Hugging Face counterpart.
    """

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]):
        self._file = file
        self._edits: dict[str, Edit] = {}
        self._stored: dict[str, str] = {}
        architecture = _architecture(file)
        layer_names = {**_LAYER_TENSORS, **architecture.tensors}
        unknown: list[str] = []
        for stored in file.tensors:
            if stored == _ROPE_FACTORS:
                continue
            name = _hf_tensor_name(stored, layer_names)
            if name is None:
                unknown.append(f"tensor {stored} has no place in {architecture.hf_name}")
                continue
            self._stored[name] = stored
            edit = _edit(name, architecture, config)
            if edit:
                self._edits[name] = edit
        if unknown:
            raise ModelError(str(file.path), unknown)

    def names(self) -> Sequence[str]:
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def dtype(self, name: str) -> np.dtype:
        self._stored[name]  # KeyError for an unknown name, as the protocol says
        return np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        values = self._file.read(self._stored[name])
        edit = self._edits.get(name)
        return edit(values) if edit else values


def _hf_tensor_name(stored: str, layer_names: Mapping[str, str]) -> str | None:
    if match := _LAYER.fullmatch(stored):
        part = layer_names.get(match[2])
        return part and f"model.layers.{match[1]}.{part}.{match[3]}"
    if match := _TOP.fullmatch(stored):
        part = _TOP_TENSORS.get(match[1])
        return part and f"{part}.{match[2]}"
    return None


def _edit(name: str, architecture: _Architecture, config: Mapping[str, Any]) -> Edit | None:
    if architecture.norm_plus_one and "norm" in name:
        return lambda weight: weight - np.float32(1.0)
    if architecture.permuted and ".q_proj." in name:
        return lambda rows: _unpermute(rows, config["num_attention_heads"])
    if architecture.permuted and ".k_proj." in name:
        return lambda rows: _unpermute(rows, config["num_key_value_heads"])
    return None


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [N*H, ...] with each head's (pair, half) order turned back into (half, pair)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
