"""Writes tiny GGUF files: the inverse, for tests, of what polyjax.io.gguf_model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROL, USER_DEFINED, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Q or K rows in the pairwise order that llama.cpp's converter stores."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    *,
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    quantize: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a model of 1 layer, 4 heads, 2 kv heads, head_dim 8, hidden 32, ffw 48, 7 tokens."""
    writer = gguf.GGUFWriter(str(path), architecture)
    keys: dict[str, Any] = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.freq_base": 5000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **(metadata or {}),
    }
    for key, value in keys.items():
        if key in without:
            continue
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, array in tensors.items():
        kind = (quantize or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The stored tensors of a llama of that size, untied; Q and K rows already permuted."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    return {
        "token_embd.weight": normal(7, 32),
        "output_norm.weight": normal(32),
        "output.weight": normal(7, 32),
        "blk.0.attn_norm.weight": normal(32),
        "blk.0.attn_q.weight": permute(normal(32, 32), 4),
        "blk.0.attn_k.weight": permute(normal(16, 32), 2),
        "blk.0.attn_v.weight": normal(16, 32),
        "blk.0.attn_output.weight": normal(32, 32),
        "blk.0.ffn_norm.weight": normal(32),
        "blk.0.ffn_gate.weight": normal(48, 32),
        "blk.0.ffn_up.weight": normal(48, 32),
        "blk.0.ffn_down.weight": normal(32, 48),
    }


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte tokens, in the shape `read_gguf` returns metadata."""
    normal = [*"\u2581heyabc", "he", "hey", "\u2581hey", "bc", "ab"]  # best first
    words = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *normal]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(normal)]
    scores = [0.0] * (3 + 256) + [-1.0 - i for i in range(len(normal))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
