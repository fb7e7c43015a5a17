"""A Llama forward pass in numpy, written from the paper's equations: the truth for live answers.

Shares nothing with the engine but the checkpoint's tensors by their Hugging Face names.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from polyjax.io.files import ModelFiles


class LlamaReference:
    """Logits at every position, computed in `dtype`: float32, or float64 to see float32's error."""

    def __init__(self, files: ModelFiles, dtype: type[np.floating]):
        self._read = functools.cache(lambda name: files.tensors.read(name).astype(dtype))
        config = files.config
        self._dtype = dtype
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config["num_key_value_heads"]
        self._head_dim: int = config["hidden_size"] // self._heads
        self._eps: float = config["rms_norm_eps"]
        self._theta: float = config["rope_theta"]

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns [S, V] for each sequence."""
        starts = np.cumsum([0, *map(len, sequences)])
        spans = [slice(a, b) for a, b in itertools.pairwise(starts)]
        embedding = self._read("model.embed_tokens.weight")
        hidden = embedding[np.concatenate([np.asarray(s) for s in sequences])]
        for i in range(self._layers):
            layer = f"model.layers.{i}."
            normed = self._norm(hidden, self._read(layer + "input_layernorm.weight"))
            hidden = hidden + self._attention(normed, layer + "self_attn.", spans)
            normed = self._norm(hidden, self._read(layer + "post_attention_layernorm.weight"))
            gate = normed @ self._read(layer + "mlp.gate_proj.weight").T
            up = normed @ self._read(layer + "mlp.up_proj.weight").T
            swish = gate / (1 + np.exp(-gate))
            hidden = hidden + (swish * up) @ self._read(layer + "mlp.down_proj.weight").T
        hidden = self._norm(hidden, self._read("model.norm.weight"))
        return [hidden[span] @ embedding.T for span in spans]  # the head is tied

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self._eps) * weight

    def _attention(self, x: np.ndarray, name: str, spans: Sequence[slice]) -> np.ndarray:
        def project(which: str, heads: int) -> np.ndarray:
            projected = x @ self._read(f"{name}{which}_proj.weight").T
            return projected.reshape(len(x), heads, self._head_dim)

        q, k = project("q", self._heads), project("k", self._kv_heads)
        v = project("v", self._kv_heads)
        mixed = np.concatenate([self._attend(q[s], k[s], v[s]) for s in spans])
        return mixed.reshape(len(x), -1) @ self._read(name + "o_proj.weight").T

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Causal attention within one sequence; each kv head serves a group of query heads."""
        group = self._heads // self._kv_heads
        q, k = self._rotate(q), self._rotate(k)
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("tnh,snh->nts", q, k) / self._dtype(math.sqrt(self._head_dim))
        scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("nts,snh->tnh", weights, v)

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotary embedding of halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
        half = self._head_dim // 2
        frequencies = self._theta ** (-np.arange(half) / half)
        angles = (np.arange(len(x))[:, None] * frequencies)[:, None, :]
        cos, sin = np.cos(angles).astype(self._dtype), np.sin(angles).astype(self._dtype)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
