"""All ops by name. primitives.py and composites.py declare them."""

from __future__ import annotations

from polyjax.core.composites import (
    DENSE_DECODE_GREEDY,
    DENSE_DECODE_STACK,
    LM_HEAD,
    LM_HEAD_SAMPLE,
    NORM_GATE_UP,
    NORM_QKV_ROPE_WRITE,
)
from polyjax.core.op import Op
from polyjax.core.primitives import (
    EMBED,
    EXPERTS,
    GATED_ACTIVATION,
    HEAD_MATMUL,
    KV_WRITE,
    LATENT_ATTENTION,
    LATENT_WRITE,
    MATMUL,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE,
    ROUTE,
)

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        EMBED,
        RMS_NORM,
        ROPE,
        KV_WRITE,
        GATED_ACTIVATION,
        MATMUL,
        NORM_QKV_ROPE_WRITE,
        PAGED_ATTENTION,
        NORM_GATE_UP,
        LM_HEAD,
        LM_HEAD_SAMPLE,
        DENSE_DECODE_STACK,
        DENSE_DECODE_GREEDY,
        ROUTE,
        EXPERTS,
        HEAD_MATMUL,
        LATENT_WRITE,
        LATENT_ATTENTION,
    )
}

__all__ = [
    "DENSE_DECODE_GREEDY",
    "DENSE_DECODE_STACK",
    "EMBED",
    "EXPERTS",
    "GATED_ACTIVATION",
    "HEAD_MATMUL",
    "KV_WRITE",
    "LATENT_ATTENTION",
    "LATENT_WRITE",
    "LM_HEAD",
    "LM_HEAD_SAMPLE",
    "MATMUL",
    "NORM_GATE_UP",
    "NORM_QKV_ROPE_WRITE",
    "OPS",
    "PAGED_ATTENTION",
    "RMS_NORM",
    "ROPE",
    "ROUTE",
]
