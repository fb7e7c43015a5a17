"""The ops: name, argument axes, reference, least flops and bytes. One declaration each."""

from __future__ import annotations

from polyjax.core import reference, reference_experts, reference_latent
from polyjax.core.op import Op, Workload

EMBED = Op("embed", ("table[V,D]", "tokens[M]"), reference.embed)
RMS_NORM = Op("rms_norm", ("x[M,D]", "weight[D]"), reference.rms_norm)
ROPE = Op("rope", ("x[M,N,H]", "cos_sin[M,R]"), reference.rope)
KV_WRITE = Op("kv_write", ("kv[P,2,K,Z,H]", "k[M,K,H]", "v[M,K,H]", "slots[M]"), reference.kv_write)
GATED_ACTIVATION = Op("gated_activation", ("gate_up[M,2,F]",), reference.gated_activation)


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

NORM_QKV_ROPE_WRITE = Op(
    "norm_qkv_rope_write",
    (
        "x[M,D]",
        "norm[D]",
        "w[K,C,H,D]",
        "bias?[K,C,H]",
        "q_norm?[H]",
        "k_norm?[H]",
        "cos_sin?[M,R]",
        "kv[P,2,K,Z,H]",
        "slots[M]",
    ),
    reference.norm_qkv_rope_write,
    lambda w: 2.0 * w["M"] * w["K"] * w["C"] * w["H"] * w["D"],
    lambda w: (
        w.dtype("w").itemsize * (w["K"] * w["C"] * w["H"] * (w["D"] + w["M"]) + w["M"] * w["D"])
    ),
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

NORM_GATE_UP = Op(
    "norm_gate_up",
    ("x[M,D]", "norm[D]", "w[2,F,D]"),
    reference.norm_gate_up,
    lambda w: 4.0 * w["M"] * w["F"] * w["D"],
    lambda w: w.dtype("w").itemsize * (2 * w["F"] * w["D"] + w["M"] * (w["F"] + w["D"])),
)


def _head_bytes(w: Workload) -> float:
    return w.dtype("w").itemsize * (w["V"] * w["D"] + w["M"] * w["D"])


LM_HEAD = Op(
    "lm_head",
    ("x[M,D]", "norm[D]", "w[V,D]"),
    reference.lm_head,
    lambda w: 2.0 * w["M"] * w["V"] * w["D"],
    lambda w: _head_bytes(w) + 4.0 * w["M"] * w["V"],
)
LM_HEAD_SAMPLE = Op(
    "lm_head_sample",
    ("x[M,D]", "norm[D]", "w[V,D]", "temperature[M]", "seeds[M]", "positions[M]"),
    reference.lm_head_sample,
    lambda w: 2.0 * w["M"] * w["V"] * w["D"],
    lambda w: _head_bytes(w) + 4.0 * w["M"],
)


def _decode_stack_weights(w: Workload) -> float:
    """Parameters of all layers (norms left out)."""
    query_dim = w["K"] * (w["G"] - 2) * w["H"]
    layer = w["K"] * w["G"] * w["H"] * w["D"] + w["D"] * query_dim + 3 * w["F"] * w["D"]
    return float(w["L"] * layer)


def _decode_stack_flops(w: Workload) -> float:
    heads = w["K"] * (w["G"] - 2)
    attention = 4.0 * w["L"] * w["B"] * heads * w["H"] * w["C"] * w["Z"]
    return 2.0 * w["B"] * (_decode_stack_weights(w) + w.get("V") * w["D"]) + attention


def _decode_stack_bytes(w: Workload) -> float:
    """Weights once and the whole bucket's keys and values; activations are negligible."""
    cache = 2.0 * w["L"] * w["B"] * w["C"] * w["Z"] * w["K"] * w["H"] * w.dtype("kv").itemsize
    weights = _decode_stack_weights(w) + w.get("V") * w["D"]
    return weights * w.dtype("qkv").itemsize + cache


_DECODE_STACK_INPUTS = (
    "x[B,D]",
    "attn_norm*[D]",
    "qkv*[K,G,H,D]",
    "o*[D,N]",
    "mlp_norm*[D]",
    "gate_up*[2,F,D]",
    "down*[D,F]",
    "kv*[P,2,K,Z,H]",
    "cos_sin[B,R]",
    "page_table[B,C]",
    "context_lens[B]",
)
DENSE_DECODE_STACK = Op(
    "dense_decode_stack",
    _DECODE_STACK_INPUTS,
    reference.dense_decode_stack,
    _decode_stack_flops,
    _decode_stack_bytes,
)
DENSE_DECODE_GREEDY = Op(
    "dense_decode_greedy",
    (*_DECODE_STACK_INPUTS, "final_norm[D]", "head[V,D]"),
    reference.dense_decode_greedy,
    _decode_stack_flops,
    _decode_stack_bytes,
)

ROUTE = Op("route", ("x[M,D]", "router[E,D]", "bias?[E]"), reference_experts.route)


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
    "latent_write", ("kv[P,1,1,Z,L]", "latent[M,L]", "slots[M]"), reference_latent.latent_write
)
LATENT_ATTENTION = Op(
    "latent_attention",
    ("q[B,T,N,L]", "kv[P,1,1,Z,L]", "page_table[B,C]", "context_lens[B]", "query_lens[B]"),
    reference_latent.latent_attention,
    lambda w: 4.0 * w["B"] * w["T"] * w["N"] * w["L"] * w["C"] * w["Z"],
    lambda w: w["B"] * w["L"] * w.dtype("kv").itemsize * (w["C"] * w["Z"] + 2.0 * w["T"] * w["N"]),
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
