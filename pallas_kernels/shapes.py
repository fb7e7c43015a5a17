"""Decode shapes of the models that kernels are tuned and checked for, whole and tensor-parallel.

Sizes are those of the models' published configurations (config.json on the Hugging Face hub).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

ROWS = (1, 8, 16, 32, 64, 256)  # batch sizes a decode step is tuned for
PAGE_SIZE = 64
EPS = 1e-5
NUM_PAGES = 256  # of an abstract pool; kernels do not specialise on it


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """One model's sizes by axis letter (a shard's if tensor-parallel)."""

    name: str
    D: int
    F: int
    V: int
    N: int
    K: int
    H: int

    @property
    def group(self) -> int:
        return self.N // self.K


MODELS = (
    DecodeShape("SmolLM2-135M", 576, 1536, 49152, 9, 3, 64),
    DecodeShape("SmolLM2-360M", 960, 2560, 49152, 15, 5, 64),
    DecodeShape("SmolLM2-1.7B", 2048, 8192, 49152, 32, 32, 64),
    DecodeShape("Llama-3.2-1B", 2048, 8192, 128256, 32, 8, 64),
    DecodeShape("Llama-3.1-8B", 4096, 14336, 128256, 32, 8, 128),
    DecodeShape("Llama-3.1-70B", 8192, 28672, 128256, 64, 8, 128),
    DecodeShape("Llama-3.1-70B TP8", 8192, 3584, 16032, 8, 1, 128),
)


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An abstract array, of bfloat16 unless told otherwise."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
