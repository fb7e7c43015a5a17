"""The mixture-of-experts feed-forward block, spread over expert and model axes of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from models.blocks import parameters
from models.blocks.attention import value
from models.blocks.parameters import Declare
from polyjax.core.mesh import Placement
from polyjax.core.model import ParamSpec, Source
from polyjax.core.op import Ops
from polyjax.core.ops import EXPERTS, MATMUL, NORM_GATE_UP, RMS_NORM, ROUTE


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Static numbers of one mixture of experts; the routing fields are those of the op `route`.

    `shared_dim` is the width of the experts that see every token, 0 for none.
    """

    embed_dim: int
    ffw_dim: int
    num_experts: int
    per_token: int
    norm_eps: float
    scoring: str
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    routing_bias: bool = False
    shared_dim: int = 0
    activation: str = "silu"


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the tensors of a mixture: `{block}.experts.0.{gate}.weight`, ..."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    routing_bias: str = "gate.e_score_correction_bias"


@dataclasses.dataclass(frozen=True)
class PackExperts:
    """Gate and up of each expert in turn -> [E,2,F,D]; with `per_expert` 1 the downs -> [E,D,F]."""

    num_experts: int
    per_expert: int

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        stacked = np.stack(arrays)
        if self.per_expert == 1:
            return stacked
        return stacked.reshape(self.num_experts, self.per_expert, *stacked.shape[1:])


def expert_specs(c: ExpertsConfig, prefix: str, names: ExpertNames) -> tuple[ParamSpec, ParamSpec]:
    """The stacked gate and up projections [E,2,F,D] and down projections [E,D,F]."""
    count, ffw, embed = c.num_experts, c.ffw_dim, c.embed_dim
    weight = lambda e, n: f"{prefix}{names.block}.experts.{e}.{n}.weight"  # noqa: E731
    gate_up = [
        Source(weight(e, n), (ffw, embed)) for e in range(count) for n in (names.gate, names.up)
    ]
    down = [Source(weight(e, names.down), (embed, ffw)) for e in range(count)]
    return (
        ParamSpec(
            (count, 2, ffw, embed),
            ("experts", None, "ffw", "embed"),
            tuple(gate_up),
            PackExperts(count, 2),
        ),
        ParamSpec(
            (count, embed, ffw), ("experts", "embed", "ffw"), tuple(down), PackExperts(count, 1)
        ),
    )


class Experts(nnx.Module):
    """Norm, routing, the chosen experts and the shared one, added to the residual."""

    def __init__(
        self,
        config: ExpertsConfig,
        prefix: str,
        norm: ParamSpec,
        declare: Declare,
        place: Placement,
        names: ExpertNames = ExpertNames(),  # frozen
    ):
        c, block = config, f"{prefix}{names.block}."
        self.config, self.place = config, place
        self.norm = declare(norm)
        router = parameters.matrix(
            f"{block}gate.weight", c.num_experts, c.embed_dim, (None, "embed")
        )
        self.router = declare(dataclasses.replace(router, dtype="float32"))
        bias = parameters.vector(f"{block}{names.routing_bias}", c.num_experts, None, "zeros")
        bias = dataclasses.replace(bias, dtype="float32")
        self.routing_bias = declare.optional(c.routing_bias, bias)
        self.gate_up, self.down = map(declare, expert_specs(c, prefix, names))
        shared = f"{block}shared_experts."
        width = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight", c.shared_dim, c.embed_dim)
        self.shared_gate_up = declare.optional(c.shared_dim > 0, parameters.gate_up(*width))
        down = parameters.matrix(
            f"{shared}down_proj.weight", c.embed_dim, c.shared_dim, ("embed", "ffw")
        )
        self.shared_down = declare.optional(c.shared_dim > 0, down)

    def __call__(self, ops: Ops, x: jax.Array) -> jax.Array:
        """x [M,D] -> x + mixture [M,D]."""
        c = self.config
        y = ops(RMS_NORM, x, self.norm[...], eps=c.norm_eps)
        ids, weights = ops(
            ROUTE,
            y,
            self.router[...],
            value(self.routing_bias),
            top_k=c.per_token,
            scoring=c.scoring,
            normalize=c.normalize,
            scale=c.scale,
            groups=c.groups,
            kept_groups=c.kept_groups,
        )
        mixed = self._mixture(ops, y, ids, weights).astype(x.dtype)
        return self.place(self._shared(ops, x) + mixed, "batch", "embed")

    def _shared(self, ops: Ops, x: jax.Array) -> jax.Array:
        """x plus the expert that sees every token."""
        if self.shared_gate_up is None or self.shared_down is None:
            return x
        hidden = ops(
            NORM_GATE_UP,
            x,
            self.norm[...],
            self.shared_gate_up[...],
            eps=self.config.norm_eps,
            activation=self.config.activation,
        )
        return ops(MATMUL, hidden, self.shared_down[...], None, x)

    def _mixture(self, ops: Ops, y: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """float32 [M,D]. On a mesh each device adds what its share of the experts contributes."""
        activation = self.config.activation
        arrays = (y, ids, weights, self.gate_up[...], self.down[...])
        plan, mesh = self.place.plan, self.place.mesh
        if plan is None or mesh is None or plan.num_devices == 1:
            return ops(EXPERTS, *arrays, activation=activation)
        expert_axis, ffw_axis = plan.spec(("experts", "ffw"))

        def share(y: jax.Array, ids: jax.Array, *rest: jax.Array) -> jax.Array:
            if expert_axis is not None:
                ids = ids - jax.lax.axis_index(expert_axis) * rest[1].shape[0]
            out = ops(EXPERTS, y, ids, *rest, activation=activation)
            axes = [axis for axis in (expert_axis, ffw_axis) if axis is not None]
            return jax.lax.psum(out, axes) if axes else out

        rows = plan.spec(("batch", None))
        specs = (
            rows,
            rows,
            rows,
            plan.spec(("experts", None, "ffw", None)),
            plan.spec(("experts", None, "ffw")),
        )
        return jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(
            *arrays
        )
