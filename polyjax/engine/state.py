"""Tier 1: weights, KV pools and per-slot state on the devices, and who may touch them.

The engine owns the only references. Programs get arrays donated and hand new ones back; after a
failed step the donated ones may be gone, and `rebuild` makes fresh, empty ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from polyjax.compiler.sampling import SamplingState
from polyjax.compiler.state import StateSpec, head_indices, state_avals
from polyjax.core.mesh import MeshPlan


class DeviceState:
    """All arrays that live across steps. `head` are the parameters samplers read."""

    def __init__(
        self, spec: StateSpec, mesh_plan: MeshPlan, mesh: Mesh, params: tuple[jax.Array, ...]
    ):
        avals = state_avals(spec, mesh_plan, mesh)
        self.spec = spec
        self.replace_params(params)
        dynamic = (avals.kv, avals.last_tokens, avals.sampling)
        # Compiled before serving: making new pools after a failure must not compile anything.
        self._zeros = (
            jax.jit(
                functools.partial(_zeros, dynamic),
                out_shardings=jax.tree.map(lambda aval: aval.sharding, dynamic),
            )
            .lower()
            .compile()
        )
        self.kv: tuple[jax.Array, ...] = ()
        self.last_tokens: jax.Array
        self.sampling: SamplingState
        self.rebuild()

    def rebuild(self) -> None:
        """Replaces everything but the weights by zeros; the old pools are freed first."""
        self.release_pools()
        self.kv, self.last_tokens, self.sampling = self._zeros()

    def release_pools(self) -> None:
        """Frees everything but the weights. No step may run until `rebuild`."""
        self.kv = ()
        self.last_tokens = self.sampling = None  # type: ignore[assignment]

    def replace_params(self, params: tuple[jax.Array, ...]) -> None:
        """Takes other weights of the same shapes and layouts, or none: () frees them."""
        self.params = params
        self.head = tuple(params[index] for index in head_indices(self.spec)) if params else ()

    @property
    def kv_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.kv)


def _zeros(avals: Any) -> Any:
    return jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), avals)
