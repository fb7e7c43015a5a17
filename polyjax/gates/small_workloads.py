"""A small workload of every op, for checks on a CPU: every axis present, no size a power of two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.op import Workload
from polyjax.core.ops import OPS

_EPS = {"eps": 1e-5}
_GROUP = {"K": 2, "H": 16, "Z": 4}  # two kv heads, so that swapping them shows
_DENSE = _GROUP | {"B": 3, "D": 40, "G": 4, "N": 64, "F": 56, "C": 4, "R": 16, "L": 2}
_SIZES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "embed": ({"V": 50, "D": 24, "M": 7}, {}),
    "rms_norm": ({"M": 5, "D": 72}, _EPS),
    "rope": ({"M": 6, "N": 3, "H": 24, "R": 16}, {}),
    "kv_write": (_GROUP | {"M": 6}, {}),
    "gated_activation": ({"M": 5, "F": 40}, {}),
    "matmul": ({"M": 5, "K": 200, "N": 72}, {}),
    "norm_qkv_rope_write": (_GROUP | {"M": 5, "D": 48, "C": 4, "R": 16}, _EPS),
    "paged_attention": (_GROUP | {"B": 4, "T": 3, "N": 4, "C": 5}, {"scale": 0.25}),
    "norm_gate_up": ({"M": 4, "D": 56, "F": 48}, _EPS),
    "lm_head": ({"M": 4, "D": 56, "V": 120}, _EPS),
    "lm_head_sample": ({"M": 6, "D": 56, "V": 120}, _EPS | {"greedy": False}),
    "dense_decode_stack": (_DENSE, _EPS | {"scale": 0.25}),
    "dense_decode_greedy": (_DENSE | {"V": 90}, _EPS | {"scale": 0.25}),
    "route": ({"M": 6, "D": 40, "E": 12}, {"top_k": 3, "scoring": "softmax", "normalize": True}),
    "experts": ({"M": 6, "A": 2, "E": 5, "D": 40, "F": 24}, {}),
    "head_matmul": ({"M": 5, "N": 3, "O": 20, "I": 28}, {}),
    "latent_write": ({"M": 6, "Z": 4, "L": 24}, {}),
    "latent_attention": (
        {"B": 4, "T": 2, "N": 3, "L": 24, "C": 5, "Z": 4},
        {"scale": 0.2, "rank": 16},
    ),
}  # fmt: skip
_INTEGERS = ("tokens", "slots", "page_table", "context_lens", "query_lens", "first_pages", "ids",
             "positions")  # fmt: skip
_FLOATS = ("cos_sin", "temperature", "weights")
_SPEC = re.compile(r"^(\w+)([?*])?\[([\w,]*)\]$")


def small_workload(
    op_name: str, dtype: str = "bfloat16", optional: tuple[str, ...] = (), **static: Any
) -> Workload:
    """Returns the op's small workload; `optional` names the optional arguments it has."""
    sizes, defaults = _SIZES[op_name]
    dims, op = sizes | {"P": 9}, OPS[op_name]
    args: list[Any] = []
    for spec in op.inputs:
        match = _SPEC.match(spec)
        assert match, spec
        name, mark, axes = match[1], match[2], match[3].split(",")
        if mark == "?" and name not in optional and name != "cos_sin":
            args.append(None)
            continue
        shape = tuple(int(a) if a.isdigit() else dims[a] for a in axes if a)
        array = jax.ShapeDtypeStruct(shape, jnp.dtype(_dtype(op_name, name, dtype)))
        args.append((array,) * sizes["L"] if mark == "*" else array)
    return op.workload(*args, **(defaults | static))


def _dtype(op_name: str, name: str, dtype: str) -> str:
    if name == "seeds":
        return "uint32"
    if name in _INTEGERS:
        return "int32"
    return "float32" if name in _FLOATS or (op_name, name) == ("route", "bias") else dtype


def small_workloads() -> Iterator[Workload]:
    """Every op, and the variants with optional arguments and statics that change the arithmetic."""
    for name in OPS:
        yield small_workload(name)
    yield small_workload("matmul", optional=("bias", "residual"))
    yield small_workload("matmul", optional=("residual",), out_dtype="float32")
    yield small_workload("norm_qkv_rope_write", optional=("bias", "q_norm", "k_norm"))
    yield small_workload("paged_attention", optional=("first_pages",), window=6)
    yield small_workload("paged_attention", soft_cap=20.0)
    yield small_workload("gated_activation", activation="gelu")
    yield small_workload("norm_gate_up", activation="gelu_pytorch_tanh")
    yield small_workload("lm_head", soft_cap=15.0)
    yield small_workload("lm_head_sample", greedy=True)
    yield small_workload("route", optional=("bias",), scoring="sigmoid", scale=2.5)
