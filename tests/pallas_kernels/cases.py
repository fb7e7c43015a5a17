"""Small workloads of every op: two to four tiles an axis, head ratios and remainders of real ones.

A case draws fresh inputs and knows the float32 truth and how far from it a kernel may be: bounds
come from `reduction_bound` (rounding of sums and of the result) and one unit roundoff per further
bfloat16 rounding of an operand, carried through the op's formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyjax.core import ops, reference
from polyjax.core.arrays import reduction_bound, unit_roundoff
from polyjax.core.noise import gumbel
from polyjax.core.op import Op, Ops, Workload

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
ROUNDING = unit_roundoff(BF16)
EPS = 1e-5
APPROXIMATE = 2.0**-20  # relative error of the chip's exp2 and log2 approximations, with margin


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one call; `judge(outputs)` raises AssertionError if they are not the op's.

    `prepare` computes the truth and gives the judge: seconds of work, so not before it is needed.
    `platforms` names those whose kernels run it: some cases are about one platform's edges.
    """

    name: str
    op: Op
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    prepare: Callable[[], Callable[[Any], None]]
    platforms: tuple[str, ...] = ("gpu", "tpu")

    def judge(self, outputs: Any) -> None:
        self.prepare()(outputs)

    @property
    def workload(self) -> Workload:
        return self.op.workload(*self.arguments, **self.static)


class Draw:
    """Fresh random inputs of one case."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape) * scale, BF16)

    def angles(self, rows: int, dim: int) -> jax.Array:
        angle = self.rng.uniform(0, 6.3, (rows, dim // 2))
        return jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], 1), F32)

    def slots(self, rows: int, pages: int, page_size: int) -> jax.Array:
        free = self.rng.permutation(np.arange(page_size, pages * page_size))
        return jnp.asarray(free[:rows], I32)


def exact(value: Any) -> Any:
    return value.astype(F32) if value is not None and value.dtype == BF16 else value


def truth(op: Op, arguments: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """The op's reference in float32 on the same inputs."""
    with jax.default_matmul_precision("highest"):
        return op.reference(Ops({}, {}), *[exact(a) for a in arguments], **static)


def within(expected: Any, bound: Any) -> Callable[[Any], None]:
    expected, bound = np.asarray(expected, np.float32), np.asarray(bound, np.float32)

    def judge(value: Any) -> None:
        value = np.asarray(value, np.float32)
        assert value.shape == expected.shape
        excess = np.abs(value - expected) - bound
        worst = np.unravel_index(
            np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape
        )
        assert (excess <= 0).all(), (
            f"at {worst}: {value[worst]}, truth {expected[worst]}, bound {bound[worst]}"
        )

    return judge


def product_bound(x: Any, w: Any, out_dtype: Any, roundings: int = 0) -> Any:
    """Bound of x [M,K] @ w[N,K].T whose x was rounded `roundings` times more than given."""
    terms = np.abs(np.asarray(x, np.float32)) @ np.abs(np.asarray(w, np.float32)).T
    return terms * (reduction_bound(out_dtype, x.shape[1]) + roundings * ROUNDING)


def normalised(x: Any, norm: Any) -> Any:
    return reference.rms_norm(None, exact(x), exact(norm), eps=EPS)


def matmul(name: str, m: int, n: int, k: int, bias: bool, residual: bool, seed: int) -> Case:
    draw = Draw(seed)
    x, w = draw.normal(m, k), draw.normal(n, k)
    if name == "zero rows":
        x = x.at[1].set(0)
    added = draw.normal(n) if bias else None, draw.normal(m, n) if residual else None
    arguments = (x, w, *added)

    def prepare() -> Callable[[Any], None]:
        expected = truth(ops.MATMUL, arguments, {})
        bound = product_bound(x, w, BF16) + ROUNDING * np.abs(expected) + 1e-6
        return within(expected, bound)

    return Case(f"matmul {name}", ops.MATMUL, arguments, {}, prepare)


def gate_up(name: str, m: int, f: int, d: int, activation: str, seed: int) -> Case:
    draw = Draw(seed)
    arguments = draw.normal(m, d), draw.normal(d), draw.normal(2, f, d, scale=d**-0.5)
    static = {"eps": EPS, "activation": activation}

    def prepare() -> Callable[[Any], None]:
        y = normalised(*arguments[:2])
        gate_w, up_w = arguments[2]
        gate, up = (y @ exact(v).T for v in (gate_w, up_w))
        gate_error, up_error = (product_bound(y, v, F32, 2) for v in (gate_w, up_w))
        activated = reference._ACTIVATIONS[activation](gate)
        expected = activated * up
        slope = 1.13  # the largest |derivative| of silu (1.10) and gelu (1.13)
        bound = np.abs(up) * slope * gate_error + np.abs(activated) * up_error
        bound += slope * gate_error * up_error + 2 * ROUNDING * np.abs(expected) + 1e-6
        return within(expected, bound)

    return Case(f"gate_up {name}", ops.NORM_GATE_UP, arguments, static, prepare)


def attention(
    name: str,
    lens: tuple[int, ...],
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    columns: int,
    seed: int,
    first: int = 0,
    queries: tuple[int, ...] = (),
    tokens: int = 1,
    **static: Any,
) -> Case:
    """Slots that no sequence owns hold NaN; a length of 0 is a row without a token.

    `queries` of a bucket's `tokens` are new (default: one where there is any); the first `first`
    pages of each sequence have been freed.
    """
    draw = Draw(seed)
    batch = len(lens)
    q = draw.normal(batch, tokens, heads, dim, scale=30.0 if name == "large logits" else 1.0)
    pool = np.array(draw.normal(batch * columns + 1, 2, kv_heads, page, dim).astype(F32))
    pages = 1 + draw.rng.permutation(batch * columns).reshape(batch, columns)
    skipped = np.array([first] * batch)
    for row, length in enumerate(lens):
        for position in range(max(0, length - skipped[row] * page), columns * page):
            pool[pages[row, position // page], :, :, position % page] = np.nan
    pool[0] = np.nan
    arguments = (
        q,
        jnp.asarray(pool, BF16),
        jnp.asarray(pages, I32),
        jnp.asarray(lens, I32),
        jnp.asarray(queries or [min(1, length) for length in lens], I32),
        *([jnp.asarray(skipped, I32)] if first else []),
    )
    static = {"scale": dim**-0.5, **static}

    def prepare() -> Callable[[Any], None]:
        expected = truth(ops.PAGED_ATTENTION, arguments, static)
        magnitudes = (q, jnp.abs(arguments[1]), *arguments[2:])
        # Softmax weights of the same scores, values taken by magnitude: the scale of the errors.
        keys_kept = magnitudes[1].at[:, 0].set(arguments[1][:, 0])
        scale_of_sums = truth(ops.PAGED_ATTENTION, (q, keys_kept, *arguments[2:]), static)
        peak = 30.0 if name == "large logits" else 1.0
        score = peak * dim * 9 * static["scale"]  # |q||k| sums: normals reach 3 in magnitude
        score_error = reduction_bound(F32, dim) * score + APPROXIMATE * score
        relative = reduction_bound(BF16, columns * page) + 2 * ROUNDING + 2 * score_error
        bound = relative * scale_of_sums + 1e-6
        return within(expected, bound)

    return Case(f"attention {name}", ops.PAGED_ATTENTION, arguments, static, prepare)


def prompts(seed: int) -> list[Case]:
    """Many new tokens a sequence: ragged, continued, padded, at the edges of tiles and pages."""
    return [
        attention("ragged prompts", (100, 0, 70), 4, 2, 64, 64, 2, seed, queries=(100, 0, 3),
                  tokens=104),
        attention("prompt chunks", (190, 64), 3, 1, 64, 32, 6, seed, queries=(60, 64), tokens=64),
        attention("prompt of heads of 128", (130,), 2, 1, 128, 128, 2, seed, queries=(130,),
                  tokens=130),
        attention("prompt with window and soft cap", (300, 90), 2, 2, 64, 16, 19, seed,
                  queries=(90, 90), tokens=96, window=70, soft_cap=20.0),
        attention("prompt after freed pages", (200, 170), 4, 1, 64, 16, 10, seed, first=3,
                  queries=(40, 9), tokens=40, window=80),
        attention("few new tokens", (65, 2, 40), 4, 4, 64, 64, 2, seed, queries=(3, 2, 1),
                  tokens=3),
        attention("prompt of heads of 256", (70,), 2, 1, 256, 64, 2, seed, queries=(70,),
                  tokens=72),
    ]  # fmt: skip


def head(name: str, m: int, v: int, d: int, seed: int, soft_cap: float = 0.0) -> Case:
    draw = Draw(seed)
    arguments = draw.normal(m, d), draw.normal(d), draw.normal(v, d)
    static = {"eps": EPS, "soft_cap": soft_cap}

    def prepare() -> Callable[[Any], None]:
        bound = product_bound(normalised(*arguments[:2]), arguments[2], F32, 2) + APPROXIMATE * 30
        expected = truth(ops.LM_HEAD, arguments, static)
        return within(expected, bound)

    return Case(f"head {name}", ops.LM_HEAD, arguments, static, prepare)


def sample(name: str, m: int, v: int, d: int, seed: int, greedy: bool = False) -> Case:
    """A token is right if its score is the row's best, up to the error of two scores."""
    draw = Draw(seed)
    x, norm, w = draw.normal(m, d), draw.normal(d), draw.normal(v, d, scale=d**-0.5)
    temperature = jnp.asarray([0.0 if greedy else 0.7 * (i % 3) for i in range(m)], F32)
    seeds = jnp.asarray(draw.rng.integers(0, 2**32, m), jnp.uint32)
    positions = jnp.asarray(draw.rng.integers(0, 2**17, m), I32)
    arguments = (x, norm, w, temperature, seeds, positions)

    def prepare() -> Callable[[Any], None]:
        y = normalised(x, norm)
        hot = np.asarray(temperature)[:, None] > 0
        divisor = np.where(hot, np.asarray(temperature)[:, None], 1.0)
        scores = np.asarray(y @ exact(w).T) / divisor
        scores = scores + np.where(hot, np.asarray(gumbel(seeds, positions, v)), 0.0)
        error = product_bound(y, w, F32, 2) / divisor + APPROXIMATE * 20

        def judge(tokens: Any) -> None:
            chosen = np.asarray(tokens)
            assert chosen.dtype == np.int32 and ((chosen >= 0) & (chosen < v)).all()
            rows = np.arange(m)
            shortfall = scores.max(1) - scores[rows, chosen]
            assert (shortfall <= 2 * error.max(1)).all(), f"shortfall {shortfall}"

        return judge

    return Case(
        f"sample {name}", ops.LM_HEAD_SAMPLE, arguments, {"eps": EPS, "greedy": greedy}, prepare
    )


def qkv(
    name: str,
    m: int,
    d: int,
    kv_heads: int,
    group: int,
    dim: int,
    seed: int,
    bias: bool = False,
    qk_norm: bool = False,
    rope: bool = True,
) -> Case:
    draw = Draw(seed)
    pages, page = 4, 16
    w = draw.normal(kv_heads, group + 2, dim, d, scale=d**-0.5)
    pool = draw.normal(pages, 2, kv_heads, page, dim)
    arguments = (
        draw.normal(m, d),
        draw.normal(d),
        w,
        draw.normal(kv_heads, group + 2, dim) if bias else None,
        draw.normal(dim) if qk_norm else None,
        draw.normal(dim) if qk_norm else None,
        draw.angles(m, dim) if rope else None,
        pool,
        draw.slots(m, pages, page),
    )
    static = {"eps": EPS}

    def prepare() -> Callable[[Any], None]:
        q, written = truth(ops.NORM_QKV_ROPE_WRITE, arguments, static)
        bound = qkv_bound(arguments)  # [M,K,group+2,H]
        judge_q = within(q, bound[:, :, :group].reshape(q.shape) + 2 * ROUNDING * np.abs(q) + 1e-6)
        new = jnp.asarray(bound[:, :, group]), jnp.asarray(bound[:, :, group + 1])
        pool_bound = reference.kv_write(None, jnp.zeros(pool.shape, F32), *new, arguments[-1])
        judge_kv = within(written, np.asarray(pool_bound) + 2 * ROUNDING * np.abs(written) + 1e-6)
        untouched = np.all(np.asarray(written) == np.asarray(pool, np.float32), -1)

        def judge(outputs: Any) -> None:
            judge_q(outputs[0])
            judge_kv(outputs[1])
            same = np.asarray(outputs[1], np.float32) == np.asarray(pool, np.float32)
            assert same[untouched].all(), "slots of no token were written"

        return judge

    return Case(f"qkv {name}", ops.NORM_QKV_ROPE_WRITE, arguments, static, prepare)


def qkv_bound(arguments: tuple[Any, ...]) -> Any:
    """Error bound of every head's values before they are rounded to bfloat16."""
    x, norm, w, bias, q_norm, k_norm, cos_sin, *_ = arguments
    activations, flat = normalised(x, norm), w.reshape(-1, w.shape[-1])
    shape = (x.shape[0], *w.shape[:3])
    y = np.asarray(activations @ exact(flat).T).reshape(shape)
    y = y if bias is None else y + np.asarray(exact(bias))
    error = product_bound(activations, flat, F32, 2).reshape(shape) + ROUNDING * np.abs(y)
    turned = slice(0, shape[2] - 1)  # queries and the key; values pass unchanged
    if q_norm is not None:
        # y / rms: the error of y, and by Cauchy-Schwarz that of rms, at most rms(error).
        rms = np.sqrt((y**2).mean(-1, keepdims=True) + EPS)
        rms_error = np.sqrt((error**2).mean(-1, keepdims=True))
        quotient = (error + np.abs(y) / rms * rms_error) / rms
        weight = np.stack([np.abs(np.asarray(exact(v))) for v in (q_norm, k_norm)])
        weights = weight[[0] * (shape[2] - 2) + [1]]  # [group+1,H]
        error[:, :, turned] = quotient[:, :, turned] * weights
    if cos_sin is not None:  # a rotated value is a sum of two
        head = error[:, :, turned]
        error[:, :, turned] = head + np.roll(head, shape[-1] // 2, axis=-1)
    return error


def single(name: str, op: Op, arguments: tuple[Any, ...], roundings: int, **static: Any) -> Case:
    def prepare() -> Callable[[Any], None]:
        expected = truth(op, arguments, static)
        scale = np.abs(expected) if roundings < 3 else np.abs(expected).max()
        bound = roundings * ROUNDING * scale + (1e-6 if roundings else 0.0)
        return within(expected, bound)

    return Case(f"{op.name} {name}", op, arguments, static, prepare)


def tpu_cases(seed: int) -> list[Case]:
    """Blocks of rows with a remainder, several tiles and steps of the depth, shared pool tiles."""
    draw = Draw(seed)
    # 18 rows: the first step's 16 share three tiles, and the second's are in two of those.
    neighbours = jnp.asarray([*range(19, 32), 3, 36, 35, 34, 24 + 14], I32)
    new = draw.normal(18, 2, 64), draw.normal(18, 2, 64)
    many = [
        matmul("many steps", 40, 200, 1024, True, True, seed),
        gate_up("many steps", 40, 200, 1024, "gelu", seed),
        head("many steps", 40, 200, 1024, seed),
        sample("many steps", 40, 456, 1024, seed),
        qkv("many steps", 40, 1024, 2, 1, 64, seed, bias=True, qk_norm=True),
        single("many steps", ops.RMS_NORM, (draw.normal(40, 192), draw.normal(192)), 2, eps=EPS),
        single("part of a head", ops.ROPE, (draw.normal(40, 3, 64), draw.angles(40, 32)), 3),
        single("shared tiles", ops.KV_WRITE, (draw.normal(4, 2, 2, 16, 64), *new, neighbours), 0),
        single(
            "many steps",
            ops.EMBED,
            (draw.normal(136, 192), jnp.asarray(draw.rng.integers(-3, 140, 40), I32)),
            0,
        ),
        attention("idle rows between", (0, 70, 0, 0, 33), 8, 2, 64, 16, 5, seed),
    ]
    return [dataclasses.replace(case, platforms=("tpu",)) for case in many]


def cases(seed: int) -> list[Case]:
    """Returns every case with inputs drawn by `seed`."""
    draw = Draw(seed)
    angles = {dim: draw.angles(2, dim) for dim in (64, 128)}
    new = draw.normal(3, 2, 64), draw.normal(3, 2, 64)
    return [
        matmul("two tiles", 8, 128, 256, False, True, seed),
        matmul("one row", 1, 192, 512, True, False, seed),
        matmul("remainder of N and M", 5, 136, 192, False, True, seed),
        matmul("zero rows", 16, 128, 256, True, True, seed),
        gate_up("one row", 1, 128, 256, "silu", seed),
        gate_up("remainder of F and M", 5, 136, 192, "gelu_pytorch_tanh", seed),
        attention("full pages and one token", (256, 1), 8, 2, 64, 64, 4, seed),
        attention("last-page edges", (64, 65, 63), 4, 1, 128, 64, 2, seed),
        attention("no token", (0, 40), 9, 3, 64, 16, 4, seed),
        attention(
            "window and soft cap", (250, 120), 8, 1, 128, 128, 2, seed, window=100, soft_cap=20.0
        ),
        attention("freed first pages", (100, 90), 4, 4, 64, 32, 3, seed, first=1, window=60),
        attention("large logits", (130,), 8, 2, 64, 32, 5, seed),
        head("remainder of V", 3, 136, 128, seed, soft_cap=20.0),
        head("eight rows", 8, 256, 256, seed),
        sample("noise, remainder of V", 3, 200, 128, seed),
        sample("greedy", 8, 256, 192, seed, greedy=True),
        qkv("whole heads of 128", 3, 128, 1, 2, 128, seed, bias=True, qk_norm=True),
        qkv("heads of 64", 8, 192, 1, 3, 64, seed),
        qkv("heads of 64, all options", 16, 128, 1, 1, 64, seed, bias=True, qk_norm=True),
        qkv("no RoPE", 2, 128, 1, 1, 128, seed, rope=False),
        single("rows", ops.RMS_NORM, (draw.normal(3, 256), draw.normal(256)), 2, eps=EPS),
        single("heads of 64", ops.ROPE, (draw.normal(2, 3, 64), angles[64]), 3),
        single("heads of 128", ops.ROPE, (draw.normal(2, 3, 128), angles[128]), 3),
        single("pool", ops.KV_WRITE, (draw.normal(4, 2, 2, 16, 64), *new, draw.slots(3, 4, 16)), 0),
        single("clipped ids", ops.EMBED, (draw.normal(40, 256), jnp.asarray([3, 99, 0], I32)), 0),
        *tpu_cases(seed),
        *prompts(seed),
    ]
