"""MiniMax-M2: partial rotation, query and key norms over the full width, sigmoid routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
from flax import nnx

from models.blocks import parameters
from models.blocks.attention import Attention, AttentionConfig, LayerStep
from models.blocks.decoder import Decoder, DecoderConfig
from models.blocks.experts import ExpertNames, Experts, ExpertsConfig
from models.blocks.hf_config import HfConfig
from models.blocks.parameters import Declare
from polyjax.core.mesh import Placement
from polyjax.core.model import ParamSpec
from polyjax.core.op import Ops
from polyjax.core.ops import KV_WRITE, MATMUL, RMS_NORM, ROPE

NAMES = ExpertNames(
    "block_sparse_moe", gate="w1", up="w3", down="w2", routing_bias="e_score_correction_bias"
)


class WideNormAttention(Attention):
    """Attention whose query and key norms run over all heads at once."""

    def __init__(
        self,
        config: AttentionConfig,
        prefix: str,
        norm: ParamSpec,
        declare: Declare,
        place: Placement,
    ):
        super().__init__(config, prefix, norm, declare, place)
        widths = {"q_norm": config.heads, "k_norm": config.kv_heads}
        self.wide_q_norm, self.wide_k_norm = (
            declare(
                parameters.vector(
                    f"{prefix}self_attn.{name}.weight", heads * config.head_dim, "heads"
                )
            )
            for name, heads in widths.items()
        )

    def query_and_write(
        self, ops: Ops, x: jax.Array, step: LayerStep, kv: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        c, rows = self.config, x.shape[0]
        y = ops(RMS_NORM, x, self.norm[...], eps=c.norm_eps)
        y = ops(MATMUL, y, self.qkv[...].reshape(-1, c.embed_dim), None, None)
        y = y.reshape(rows, c.kv_heads, -1, c.head_dim)
        q, k, v = y[:, :, :-2].reshape(rows, -1), y[:, :, -2].reshape(rows, -1), y[:, :, -1]
        q = ops(RMS_NORM, q, self.wide_q_norm[...], eps=c.norm_eps)
        k = ops(RMS_NORM, k, self.wide_k_norm[...], eps=c.norm_eps)
        q, k = q.reshape(rows, c.heads, c.head_dim), k.reshape(rows, c.kv_heads, c.head_dim)
        if step.cos_sin is not None:
            q, k = ops(ROPE, q, step.cos_sin), ops(ROPE, k, step.cos_sin)
        return q, ops(KV_WRITE, kv, k, v, step.slots)


class Model(Decoder):
    """Pre-norm decoder whose layers choose among experts."""

    config: Config

    def make_attention(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        norm = self.norm_spec(f"{prefix}input_layernorm.weight")
        return WideNormAttention(self.config.attention(layer), prefix, norm, declare, self.place)

    def make_feed_forward(self, layer: int, prefix: str, declare: Declare) -> nnx.Module:
        norm = self.norm_spec(f"{prefix}post_attention_layernorm.weight")
        return Experts(self.config.experts, prefix, norm, declare, self.place, NAMES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """A MiniMax-M2 decoder."""

    experts: ExpertsConfig

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Returns the config. Raises ModelError listing every unsupported or missing value."""
        hf = HfConfig(config)
        fields = hf.decoder_fields()
        layers, head_dim = fields["num_layers"], fields["head_dim"]
        rope = dict(hf.rope_parameters())
        if hf.get("rotary_dim") is not None:  # how the released checkpoints say it
            rope.setdefault("partial_rotary_factor", hf.integer("rotary_dim") / head_dim)
        experts = ExpertsConfig(
            embed_dim=fields["embed_dim"],
            ffw_dim=fields["ffw_dim"],
            num_experts=hf.integer("num_local_experts"),
            per_token=hf.integer("num_experts_per_tok"),
            norm_eps=fields["norm_eps"],
            scoring=hf.one_of("scoring_func", ("sigmoid",), "sigmoid"),
            normalize=True,
            routing_bias=hf.one_of("use_routing_bias", (True,), True),
            activation=fields["activation"],
        )
        hf.one_of("use_qk_norm", (True,), True)
        hf.one_of("qk_norm_type", ("per_layer",), "per_layer")
        hf.one_of("shared_intermediate_size", (0,), 0)
        if set(hf.integers("attn_type_list")) - {1}:
            hf.problem("attn_type_list has layers that are not full attention (1)")
        built = cls(
            **fields,
            experts=experts,
            windows=(0,) * layers,
            ropes=(hf.rope(head_dim, rope, default_theta=5e6),) * layers,
        )
        hf.check_experts(experts)
        hf.finish()
        return built
