"""Parameters: one declaration each of shape, logical axes, checkpoint tensors and packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from polyjax.core.model import Pack, ParamSpec, Source


@dataclasses.dataclass(frozen=True)
class Declare:
    """Makes parameters of the model's dtype, of zeros: weights are loaded elsewhere."""

    dtype: str = "float32"

    def __call__(self, spec: ParamSpec) -> nnx.Param:
        """Returns the parameter `spec` describes, with the spec as metadata."""
        return nnx.Param(jnp.zeros(spec.shape, jnp.dtype(spec.dtype or self.dtype)), spec=spec)

    def optional(self, wanted: bool, spec: ParamSpec) -> nnx.Param | None:
        """The parameter, or None where the config leaves it out."""
        return self(spec) if wanted else None


def as_is(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The checkpoint tensor unchanged."""
    return arrays[0]


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Equal tensors along a new leading axis: gate and up [F,D] -> [2,F,D]."""
    return np.stack(arrays)


@dataclasses.dataclass(frozen=True)
class PackHeads:
    """Query, key and value tensors -> one, grouped by kv head: its G queries, its key, its value.

    q [K*G*H,...], k [K*H,...], v [K*H,...] -> [K,G+2,H,...]. Splitting the leading axis over
    devices keeps a kv head and the queries that read it together.
    """

    kv_heads: int
    head_dim: int

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        grouped = [a.reshape(self.kv_heads, -1, self.head_dim, *a.shape[1:]) for a in arrays]
        return np.concatenate(grouped, axis=1)


def vector(
    name: str, size: int, axis: str | None = "embed", init: str = "ones", pack: Pack = as_is
) -> ParamSpec:
    """A norm weight or a bias [size] taken from the checkpoint tensor `name`."""
    return ParamSpec((size,), (axis,), (Source(name, (size,)),), pack, init)


def matrix(name: str, rows: int, columns: int, axes: tuple[str | None, str | None]) -> ParamSpec:
    """A projection [N,K] stored as the checkpoint has it: a row per output, contiguous in K."""
    return ParamSpec((rows, columns), axes, (Source(name, (rows, columns)),), as_is)


def gate_up(gate: str, up: str, ffw_dim: int, embed_dim: int) -> ParamSpec:
    """The gate and up projections [2,F,D]."""
    sources = tuple(Source(name, (ffw_dim, embed_dim)) for name in (gate, up))
    return ParamSpec((2, ffw_dim, embed_dim), (None, "ffw", "embed"), sources, stacked)


def gate_up_bias(gate: str, up: str, ffw_dim: int) -> ParamSpec:
    """The biases of the gate and up projections [2,F]."""
    sources = tuple(Source(name, (ffw_dim,)) for name in (gate, up))
    return ParamSpec((2, ffw_dim), (None, "ffw"), sources, stacked, "zeros")


def qkv(prefix: str, heads: int, kv_heads: int, head_dim: int, embed_dim: int) -> ParamSpec:
    """The fused query, key and value projection [K,G+2,H,D]."""
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    return ParamSpec(
        (kv_heads, heads // kv_heads + 2, head_dim, embed_dim),
        ("kv_heads", None, "head_dim", "embed"),
        tuple(Source(f"{prefix}{n}.weight", (r * head_dim, embed_dim)) for n, r in rows.items()),
        PackHeads(kv_heads, head_dim),
    )


def qkv_bias(prefix: str, heads: int, kv_heads: int, head_dim: int) -> ParamSpec:
    """The biases of the fused projection [K,G+2,H]."""
    rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    return ParamSpec(
        (kv_heads, heads // kv_heads + 2, head_dim),
        ("kv_heads", None, "head_dim"),
        tuple(Source(f"{prefix}{n}.bias", (r * head_dim,)) for n, r in rows.items()),
        PackHeads(kv_heads, head_dim),
        "zeros",
    )
