"""The ops that are not made of others: name, argument axes, reference, least flops and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from polyjax.core import reference, reference_experts, reference_latent
from polyjax.core.op import Op, Workload


def _moves(argument: str, *axes: str, times: int) -> Callable[[Workload], float]:
    """Bytes of an op that does little but pass `times` arrays of these axes by."""
    return lambda w: float(times * w.dtype(argument).itemsize * math.prod(w[a] for a in axes))


EMBED = Op(
    "embed",
    ("table[V,D]", "tokens[M]"),
    reference.embed,
    bytes_moved=_moves("table", "M", "D", times=2),
)
RMS_NORM = Op(
    "rms_norm",
    ("x[M,D]", "weight[D]"),
    reference.rms_norm,
    bytes_moved=_moves("x", "M", "D", times=2),
)
ROPE = Op(
    "rope",
    ("x[M,N,H]", "cos_sin[M,R]"),
    reference.rope,
    bytes_moved=_moves("x", "M", "N", "H", times=2),
)
KV_WRITE = Op(
    "kv_write",
    ("kv[P,2,K,Z,H]", "k[M,K,H]", "v[M,K,H]", "slots[M]"),
    reference.kv_write,
    bytes_moved=_moves("kv", "M", "K", "H", times=4),
)
GATED_ACTIVATION = Op(
    "gated_activation",
    ("gate_up[M,2,F]",),
    reference.gated_activation,
    bytes_moved=_moves("gate_up", "M", "F", times=3),
)


def _matmul_flops(w: Workload) -> float:
    return 2.0 * w["M"] * w["N"] * w["K"]


def _matmul_bytes(w: Workload) -> float:
    size = w.dtype("w").itemsize
    return size * (w["N"] * w["K"] + w["M"] * (w["N"] + w["K"]))


MATMUL = Op(
    "matmul",
    ("x[M,K]", "w[N,K]", "bias?[N]", "residual?[M,N]"),
    reference.matmul,
    _matmul_flops,
    _matmul_bytes,
)


def _attention_flops(w: Workload) -> float:
    """QK and PV over the whole bucket's context."""
    return 4.0 * w["B"] * w["T"] * w["N"] * w["H"] * w["C"] * w["Z"]


def _attention_bytes(w: Workload) -> float:
    kv = 2.0 * w["B"] * w["C"] * w["Z"] * w["K"] * w["H"] * w.dtype("kv").itemsize
    return kv + 2.0 * w["B"] * w["T"] * w["N"] * w["H"] * w.dtype("q").itemsize


PAGED_ATTENTION = Op(
    "paged_attention",
    (
        "q[B,T,N,H]",
        "kv[P,2,K,Z,H]",
        "page_table[B,C]",
        "context_lens[B]",
        "query_lens[B]",
        "first_pages?[B]",
    ),
    reference.paged_attention,
    _attention_flops,
    _attention_bytes,
)

ROUTE = Op(
    "route",
    ("x[M,D]", "router[E,D]", "bias?[E]"),
    reference_experts.route,
    lambda w: 2.0 * w["M"] * w["E"] * w["D"],
    _moves("router", "E", "D", times=1),
)


def _expert_bytes(w: Workload) -> float:
    """Each chosen expert's weights once; as many experts as pairs while there are fewer pairs."""
    chosen = min(w["E"], w["M"] * w["A"])
    return w.dtype("gate_up").itemsize * 3.0 * chosen * w["F"] * w["D"]


EXPERTS = Op(
    "experts",
    ("x[M,D]", "ids[M,A]", "weights[M,A]", "gate_up[E,2,F,D]", "down[E,D,F]"),
    reference_experts.experts,
    lambda w: 6.0 * w["M"] * w["A"] * w["F"] * w["D"],
    _expert_bytes,
)

HEAD_MATMUL = Op(
    "head_matmul",
    ("x[M,N,I]", "w[N,O,I]"),
    reference_latent.head_matmul,
    lambda w: 2.0 * w["M"] * w["N"] * w["O"] * w["I"],
    lambda w: w.dtype("w").itemsize * w["N"] * (w["O"] * w["I"] + w["M"] * (w["O"] + w["I"])),
)
LATENT_WRITE = Op(
    "latent_write",
    ("kv[P,1,1,Z,L]", "latent[M,L]", "slots[M]"),
    reference_latent.latent_write,
    bytes_moved=_moves("kv", "M", "L", times=2),
)
LATENT_ATTENTION = Op(
    "latent_attention",
    ("q[B,T,N,L]", "kv[P,1,1,Z,L]", "page_table[B,C]", "context_lens[B]", "query_lens[B]"),
    reference_latent.latent_attention,
    lambda w: 4.0 * w["B"] * w["T"] * w["N"] * w["L"] * w["C"] * w["Z"],
    lambda w: w["B"] * w["L"] * w.dtype("kv").itemsize * (w["C"] * w["Z"] + 2.0 * w["T"] * w["N"]),
)
