"""Fresh inputs of every op for a workload and a seed: random ones, and ones made to break kernels.

Each case differs from call to call in every array, so nothing can be remembered; sizes around the
workload's own come from `sizes_around`.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyjax.core.op import Op, Workload
from polyjax.core.ops import OPS
from polyjax.gates.paged_rows import LAYOUTS, PagedRows, paged_rows

STYLES = ("random", "positive", "outliers", "small_rows", "large", "zero_rows", "nan_row")
_SPEC = re.compile(r"^(\w+)([?*])?\[([\w,]*)\]$")
_NEW_ROWS = ("x", "q", "k", "v", "latent", "residual")  # one row a token; the rest are parameters


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `args` in the op's order, numpy arrays, None where absent, tuples for layers.

    `rows` says who owns the pool where there is one; `poison` is what its unowned slots hold.
    `live` [M] marks the rows whose results mean something.
    """

    name: str
    op: Op
    workload: Workload
    args: tuple[Any, ...]
    live: np.ndarray
    rows: PagedRows | None = None

    @property
    def named(self) -> dict[str, Any]:
        """Argument name -> array."""
        return dict(zip(argument_names(self.op), self.args, strict=True))

    @property
    def static(self) -> dict[str, Any]:
        return dict(self.workload.static)

    def replaced(self, **arrays: Any) -> Case:
        """The same case with some arguments changed."""
        return dataclasses.replace(self, args=tuple((self.named | arrays).values()))


def argument_names(op: Op) -> tuple[str, ...]:
    return tuple(_parsed(spec)[0] for spec in op.inputs)


def _parsed(spec: str) -> tuple[str, str, tuple[str, ...]]:
    match = _SPEC.match(spec)
    assert match, f"malformed input spec {spec!r}"
    return match[1], match[2] or "", tuple(a for a in match[3].split(",") if a)


def rng_of(workload: Workload, seed: int) -> np.random.Generator:
    """Random numbers of this workload and seed; equal for every candidate."""
    return np.random.default_rng([seed, zlib.crc32(workload.key.encode())])


def cases(workload: Workload, seed: int, limit: int | None = None) -> Iterator[Case]:
    """Yields cases of one shape, styles and page layouts in a random order; at most `limit`.

    The pool's size P is no part of a workload and changes with the seed.
    """
    rng = rng_of(workload, seed)
    op = OPS[workload.op]
    styles = [s for s in STYLES if s in _styles_of(op)]
    kinds = [*styles, *_ties_of(op)]
    layouts = LAYOUTS if _has_pool(op) else ("",)
    count = max(len(kinds), len(layouts)) if limit is None else limit
    if limit is None and op.name in ("kv_write", "latent_write"):  # cheap, and wrong at few slots
        count *= 4
    spare = spare_pages(seed)
    order, dealt = rng.permutation(len(kinds)), rng.permutation(len(layouts))
    for index in range(count):
        style, layout = kinds[order[index % len(kinds)]], layouts[dealt[index % len(layouts)]]
        yield make_case(op, workload, rng, style, layout, spare)


def spare_pages(seed: int) -> int:
    """Pages beyond what a full page table needs; one number a seed, so that it compiles once."""
    return seed % 3


def _has_pool(op: Op) -> bool:
    return any(_parsed(spec)[0] == "kv" for spec in op.inputs)


def _styles_of(op: Op) -> tuple[str, ...]:
    if op.name in ("embed", "kv_write", "latent_write"):
        return ("random", "large", "nan_row")
    if op.name in ("route", "experts"):  # the choice of experts of a NaN row means nothing
        return tuple(s for s in STYLES if s != "nan_row")
    return STYLES


def _ties_of(op: Op) -> tuple[str, ...]:
    """Exact ties, and best logits closer together than 16 bits can tell."""
    heads = ("lm_head", "lm_head_sample", "dense_decode_greedy")
    return ("ties", "near_ties") if op.name in heads else ()


def make_case(
    op: Op,
    workload: Workload,
    rng: np.random.Generator,
    style: str,
    layout: str,
    spare: int = 0,
    rows: PagedRows | None = None,
) -> Case:
    """One case of a style and, for paged ops, a page layout and a number of pages to spare.

    `rows` are used instead of new ones where given.
    """
    dims = dict(workload.dims)
    if _has_pool(op):
        rows = rows or _rows(op, workload, rng, layout, spare)
        dims["P"] = rows.num_pages
    made: dict[str, Any] = {}
    for spec in op.inputs:
        name, mark, axes = _parsed(spec)
        if mark == "?" and not workload.has(name):
            made[name] = None
            continue
        shape = tuple(int(a) if a.isdigit() else dims[a] for a in axes)
        layers = dims.get("L", 1) if mark == "*" else 1
        arrays = tuple(_array(op, workload, name, shape, rng, style, rows) for _ in range(layers))
        made[name] = arrays if mark == "*" else arrays[0]
    case = Case(f"{style}/{layout}" if layout else style, op, workload, tuple(made.values()),
                _live(op, workload, rows), rows)  # fmt: skip
    return _with_ties(case, rng, style == "near_ties") if style in ("ties", "near_ties") else case


def _rows(
    op: Op, workload: Workload, rng: np.random.Generator, layout: str, spare: int
) -> PagedRows:
    if "page_table" in argument_names(op):
        batch, tokens, columns = workload["B"], workload.get("T", 1), workload["C"]
    else:  # an op that only writes has slots but no table: each row is a sequence of its own
        batch, tokens, columns = workload["M"], 1, 3
    window = workload.option("window", 0) if workload.has("first_pages") else 0
    return paged_rows(rng, layout, batch, tokens, columns, workload["Z"], window, spare)


def _live(op: Op, workload: Workload, rows: PagedRows | None) -> np.ndarray:
    if rows is None or "query_lens" in argument_names(op):  # attention defines idle rows as 0
        return np.ones(workload.get("M", workload.get("B")), bool)
    return rows.query_lens > 0


def _array(
    op: Op,
    workload: Workload,
    name: str,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    style: str,
    rows: PagedRows | None,
) -> np.ndarray:
    dtype = jnp.dtype(dict(workload.dtypes)[name])
    if rows is not None and name in ("page_table", "context_lens", "query_lens", "first_pages"):
        return getattr(rows, name).astype(dtype)
    if rows is not None and name == "slots":
        return rows.new_slots[:, 0].astype(dtype)
    if rows is not None and name == "kv":
        return _pool(op, shape, rng, rows).astype(dtype)
    if (op.name, name) in _SPECIAL:
        return _SPECIAL[op.name, name](workload, shape, rng).astype(dtype)
    if name == "cos_sin":
        angles = rng.uniform(0, 40_000, (shape[0], shape[1] // 2)) % (2 * np.pi)
        return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(dtype)
    if "norm" in name or name == "weight":
        return (1 + 0.2 * rng.standard_normal(shape)).astype(dtype)
    activation = name in _NEW_ROWS or op.name == "gated_activation"
    values = rng.standard_normal(shape)
    if style == "positive":
        values = np.abs(values)
    if not activation:
        return (values / np.sqrt(shape[-1])).astype(dtype)
    return _styled(values, rng, style, rows).astype(dtype)


def _styled(
    values: np.ndarray, rng: np.random.Generator, style: str, rows: PagedRows | None
) -> np.ndarray:
    """Activations [rows, ...]: whole rows or single features at sizes that break arithmetic."""
    per_row = (len(values), *[1] * (values.ndim - 1))
    flat = values.reshape(len(values), -1)
    if style == "outliers":
        flat[np.arange(len(flat)), rng.integers(0, flat.shape[1], len(flat))] *= 300.0
    elif style == "small_rows":
        return values * 10.0 ** -rng.uniform(1, 9, per_row)
    elif style == "large":
        scale = 10.0 ** rng.uniform(0.5, 4, per_row)
        scale[rng.integers(len(scale))] = (
            1e5  # beyond the range of every 8- and 16-bit float but one
        )
        return values * scale
    elif style == "zero_rows":
        flat[rng.permutation(len(flat))[: max(1, len(flat) // 2)]] = 0.0
    elif style == "nan_row":
        live = np.arange(len(flat)) if rows is None else np.flatnonzero(rows.query_lens)
        for row in live[
            rng.permutation(len(live))[:1]
        ]:  # in its first token, which is never padding
            tokens = values.shape[1] if values.ndim == 4 else 1
            flat[row, rng.integers(flat.shape[1] // tokens)] = np.nan
    return values


def _pool(op: Op, shape: tuple[int, ...], rng: np.random.Generator, rows: PagedRows) -> np.ndarray:
    """Owned slots hold keys and values; the others poison: NaN or large numbers, slot by slot.

    An op that only writes gets numbers everywhere, so that each changed slot shows.
    """
    pool = rng.standard_normal(shape)
    if "page_table" not in argument_names(op):
        return pool
    poison = np.where(rng.random((shape[0], shape[3])) < 0.5, np.nan, 1e4)
    # An op without query_lens writes the new tokens itself.
    owned = rows.owned if "query_lens" in argument_names(op) else rows.earlier()
    return np.where(owned[:, None, None, :, None], pool, poison[:, None, None, :, None])


def _token_ids(workload: Workload, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    vocab = workload["V"]
    ids = rng.integers(0, vocab, shape)
    edges = [0, vocab - 1, vocab, -1]  # the last two are out of range: clipped
    ids[: len(edges)] = edges[: len(ids)]
    return rng.permutation(ids)


def _expert_ids(workload: Workload, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Distinct experts a token; some belong to another device, one expert gets many tokens."""
    experts = workload["E"]
    ids = np.stack([rng.permutation(experts)[: shape[1]] for _ in range(shape[0])])
    crowded = rng.random(len(ids)) < 0.5
    ids[crowded, 0] = np.where((ids[crowded] == 0).any(-1), ids[crowded, 0], 0)
    ids[rng.random(shape) < 0.15] = experts + 3
    return ids


def _temperatures(_w: Workload, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.uniform(0.3, 1.8, shape)
    values[rng.random(shape) < 0.3] = 0.0
    return values


_Fill = Callable[[Workload, tuple[int, ...], np.random.Generator], np.ndarray]
_SPECIAL: dict[tuple[str, str], _Fill] = {
    ("embed", "tokens"): _token_ids,
    ("experts", "ids"): _expert_ids,
    ("experts", "weights"): lambda _w, shape, rng: rng.uniform(0.05, 1.0, shape),
    ("lm_head_sample", "temperature"): _temperatures,
    ("lm_head_sample", "seeds"): lambda _w, shape, rng: rng.integers(0, 2**32, shape),
    ("lm_head_sample", "positions"): lambda _w, shape, rng: rng.integers(0, 2**17, shape),
}


def _with_ties(case: Case, rng: np.random.Generator, nearly: bool) -> Case:
    """Several tokens have exactly the best logit in every arithmetic: only the lowest id is right.

    Each tied row of the head reads one feature, so its logit is a single product without a sum.
    Near ties read a second feature a little, of the other sign in every other row: they differ by
    some 2^-12 of the logit, which 16-bit logits cannot hold, and no one token is best in all rows.
    """
    name = "head" if "head" in case.named else "w"
    head = case.named[name].astype(np.float64) * 1e-3
    vocab, width = head.shape
    tied = rng.permutation(vocab)[: min(vocab, int(rng.integers(3, 6)))]
    best, second = rng.permutation(width)[:2]
    head[tied] = 0.0
    head[tied, best] = 8.0
    if nearly:
        head[tied, second] = 2.0**-9 * rng.permutation(len(tied))
    arrays = {name: head.astype(case.named[name].dtype)}
    if "final_norm" in case.named:  # the stack's output is not ours to choose, its norm is
        norm = np.full(width, 1e-3)
        norm[[best, second]] = 1.0
        arrays["final_norm"] = norm.astype(case.named["final_norm"].dtype)
        return case.replaced(**arrays)
    x = case.named["x"].copy()
    x[:, [best, second]] = (np.abs(x[:, [best, second]].astype(np.float64)) + 1.0).astype(x.dtype)
    if nearly:
        x[::2, second] *= -1
    arrays["x"] = x
    if "temperature" in case.named:
        arrays["temperature"] = np.zeros_like(case.named["temperature"])
    return case.replaced(**arrays)


def sizes_around(workload: Workload, seed: int, count: int) -> Iterator[Workload]:
    """Yields up to `count` workloads of other sizes: a kernel may not know which one is checked.

    Batch-like axes take any size, feature axes move by amounts that no tile divides; then other
    dtypes. A candidate that does not support one is simply not asked about it.
    """
    rng = np.random.default_rng([seed, zlib.crc32(workload.key.encode()), 1])
    batch_like, features = _VARYING[workload.op]
    for _ in range(count):
        sizes = {
            axis: int(rng.integers(1, 2 * workload[axis] + 3))
            for axis in batch_like
            if rng.random() < 0.8
        }
        for axis in features:
            if rng.random() < 0.6:
                sizes[axis] = max(4, workload[axis] + int(rng.integers(-13, 25)))
        if "C" in batch_like and rng.random() < 0.3:
            sizes |= {"C": workload["C"] * 6, "B": min(workload["B"], 2)}
        yield workload.resized(**sizes)


# Axes that may take any size, and widths that move by amounts no tile divides. Axes that are tied
# to each other (heads and groups) keep their sizes.
_VARYING = {
    "embed": ("M", "VD"),
    "rms_norm": ("M", "D"),
    "rope": ("MN", ""),
    "kv_write": ("M", ""),
    "gated_activation": ("M", "F"),
    "matmul": ("M", "NK"),
    "norm_qkv_rope_write": ("M", "D"),
    "paged_attention": ("BTC", ""),
    "norm_gate_up": ("M", "FD"),
    "lm_head": ("M", "VD"),
    "lm_head_sample": ("M", "VD"),
    "dense_decode_stack": ("BC", "DF"),
    "dense_decode_greedy": ("BC", "DFV"),
    "route": ("M", "D"),
    "experts": ("M", "DF"),
    "head_matmul": ("MN", "OI"),
    "latent_write": ("M", ""),
    "latent_attention": ("BTC", ""),
}


def in_dtype(workload: Workload, dtype: str) -> Workload:
    """The workload with its 16-bit floating point arguments in another dtype."""
    half = ("bfloat16", "float16")
    dtypes = tuple((name, dtype if d in half else d) for name, d in workload.dtypes)
    return dataclasses.replace(workload, dtypes=dtypes)
