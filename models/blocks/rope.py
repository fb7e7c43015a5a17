"""Rotary position embeddings: inverse frequencies of every supported scaling, and a step's table.

Formulas follow the papers named below; field names are those of Hugging Face's `rope_parameters`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotates the first `dim` dims of a head; `original_context` is the length trained unscaled.

    kind: "default"; "linear" (positions / factor); "dynamic" (NTK-aware base that grows with the
    position, so a token is rotated the same however the context was cut into steps); "llama3"
    (Llama 3.1: low frequencies divided by factor, smooth between); "yarn" (Peng et al. 2023,
    eqs. 17-25).
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def inverse_frequencies(self) -> np.ndarray:
        """[dim/2] float32 radians per position; of the dynamic kind, those within its context."""
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        inverse = (1.0 / np.float32(self.theta) ** exponent).astype(np.float32)
        if self.kind == "linear":
            return inverse / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(inverse)
        if self.kind == "yarn":
            return self._yarn(inverse)
        return inverse

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        turns = self.original_context * inverse / (2 * math.pi)  # rotations within the context
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * inverse / self.factor + smooth * inverse).astype(np.float32)

    def _yarn(self, inverse: np.ndarray) -> np.ndarray:
        def dim_of(rotations: float) -> float:
            """The dim that makes this many rotations within the original context."""
            per_turn = self.original_context / (rotations * 2 * math.pi)
            return self.dim * math.log(per_turn) / (2 * math.log(self.theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
        kept = 1.0 - np.clip(ramp, 0.0, 1.0)
        return (inverse / self.factor * (1 - kept) + inverse * kept).astype(np.float32)

    @property
    def cos_sin_scale(self) -> float:
        """What cos and sin are multiplied with (yarn's attention temperature; 1 otherwise)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)

    def cos_sin(self, positions: jax.Array) -> jax.Array:
        """positions [M] int32 -> [M,dim] float32: cosines, then sines."""
        position = positions.astype(jnp.float32)[:, None]
        dynamic = self.kind == "dynamic"
        angle = position * (self._dynamic(position) if dynamic else self.inverse_frequencies())
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1) * self.cos_sin_scale

    def _dynamic(self, position: jax.Array) -> jax.Array:
        """[M,dim/2] inverse frequencies with the base for a context of position + 1 tokens."""
        length = jnp.maximum(position + 1.0, float(self.original_context))
        growth = self.factor * length / self.original_context - (self.factor - 1.0)
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        stretch: jax.Array = growth ** (-exponent * (self.dim / (self.dim - 2)))
        return jnp.asarray(self.inverse_frequencies()) * stretch


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature 0.1 m ln(s) + 1 (eq. 22 with DeepSeek-V2's m); 1 for s <= 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
