"""The dense gated feed-forward block."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from models.blocks import parameters
from models.blocks.attention import value
from models.blocks.parameters import Declare
from polyjax.core.mesh import Placement
from polyjax.core.model import ParamSpec
from polyjax.core.op import Ops
from polyjax.core.ops import GATED_ACTIVATION, MATMUL, NORM_GATE_UP, RMS_NORM


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Static numbers of one gated feed-forward block."""

    embed_dim: int
    ffw_dim: int
    norm_eps: float
    activation: str = "silu"
    bias: bool = False


class FeedForward(nnx.Module):
    """Norm, gate and up projections, gated activation, down projection, added to the residual."""

    def __init__(
        self,
        config: FeedForwardConfig,
        prefix: str,
        norm: ParamSpec,
        declare: Declare,
        place: Placement,
    ):
        c, mlp = config, f"{prefix}mlp."
        self.config, self.place = config, place
        self.norm = declare(norm)
        gate, up, down = (f"{mlp}{name}_proj" for name in ("gate", "up", "down"))
        self.gate_up = declare(
            parameters.gate_up(f"{gate}.weight", f"{up}.weight", c.ffw_dim, c.embed_dim)
        )
        self.down = declare(
            parameters.matrix(f"{down}.weight", c.embed_dim, c.ffw_dim, ("embed", "ffw"))
        )
        bias = parameters.gate_up_bias(f"{gate}.bias", f"{up}.bias", c.ffw_dim)
        self.gate_up_bias = declare.optional(c.bias, bias)
        bias = parameters.vector(f"{down}.bias", c.embed_dim, init="zeros")
        self.down_bias = declare.optional(c.bias, bias)

    def __call__(self, ops: Ops, x: jax.Array) -> jax.Array:
        """x [M,D] -> x + feed-forward [M,D]."""
        y = ops(MATMUL, self.hidden(ops, x), self.down[...], value(self.down_bias), x)
        return self.place(y, "batch", "embed")

    def hidden(self, ops: Ops, x: jax.Array) -> jax.Array:
        """x [M,D] -> activation(gate) * up [M,F]."""
        c = self.config
        if self.gate_up_bias is None:
            y = ops(
                NORM_GATE_UP,
                x,
                self.norm[...],
                self.gate_up[...],
                eps=c.norm_eps,
                activation=c.activation,
            )
        else:
            y = ops(RMS_NORM, x, self.norm[...], eps=c.norm_eps)
            weight = self.gate_up[...].reshape(-1, c.embed_dim)
            y = ops(MATMUL, y, weight, self.gate_up_bias[...].reshape(-1), None)
            y = y.reshape(x.shape[0], 2, c.ffw_dim)
            y = ops(GATED_ACTIVATION, y, activation=c.activation)
        return self.place(y, "batch", "ffw")
