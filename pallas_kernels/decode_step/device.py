"""Per-thread code for Mosaic GPU: typed scalars, control flow, and the PTX of a persistent kernel.

`plgpu.inline_mgpu` hands a kernel body over to code that emits MLIR for every single thread. This
module makes such code read like arithmetic: a `Scalar` is one register, `when`, `loop` and `choose`
are control flow, and each function below is one PTX instruction (PTX ISA 8.5 names in the
docstrings). Index arithmetic written with `+ - * // %` works on Python ints as well, so that tests
evaluate the same address functions without a GPU. Integers are never negative: division is
unsigned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

NOTHING = -1
"""A word not sent yet. As float32 or two bf16 it is a NaN that no arithmetic makes."""
POLL_LIMIT = 1 << 22  # polls of about 0.5 us: a lost message traps after seconds, it does not hang


# The stubs of these two know only the generated constructors.
_for: Any = scf.ForOp
_if: Any = scf.IfOp


def _type(kind: str) -> ir.Type:
    if kind == "f32":
        return ir.F32Type.get()
    return ir.IntegerType.get_signless(int(kind[1:]))


def _constant(value: int | float, kind: str) -> ir.Value:
    return mosaic_utils.c(float(value) if kind == "f32" else int(value), _type(kind))


class Scalar:
    """One value per thread: i1, i32, i64 or f32. Python numbers mix in as constants."""

    __slots__ = ("kind", "value")

    def __init__(self, value: ir.Value):
        self.value = value
        self.kind = str(value.type)

    def _binary(self, other: Any, integer: Any, floating: Any, swap: bool = False) -> Scalar:
        right = other.value if isinstance(other, Scalar) else _constant(other, self.kind)
        operands = (right, self.value) if swap else (self.value, right)
        return Scalar((floating if self.kind == "f32" else integer)(*operands))

    def __add__(self, other: Any) -> Scalar:
        if isinstance(other, int) and other == 0:
            return self
        return self._binary(other, arith.addi, arith.addf)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Scalar:
        return self._binary(other, arith.subi, arith.subf)

    def __ge__(self, other: Any) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.sge, arith.CmpFPredicate.OGE)

    def __rsub__(self, other: Any) -> Scalar:
        return self._binary(other, arith.subi, arith.subf, swap=True)

    def __mul__(self, other: Any) -> Scalar:
        if isinstance(other, int) and other == 1:
            return self
        return self._binary(other, arith.muli, arith.mulf)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Scalar:
        if isinstance(other, int) and other == 1:
            return self
        return self._binary(other, arith.divui, None)

    def __mod__(self, other: Any) -> Scalar:
        return self._binary(other, arith.remui, None)

    def __and__(self, other: Any) -> Scalar:
        return self._binary(other, arith.andi, None)

    def __or__(self, other: Any) -> Scalar:
        return self._binary(other, arith.ori, None)

    def __xor__(self, other: Any) -> Scalar:
        return self._binary(other, arith.xori, None)

    def __lshift__(self, bits: int) -> Scalar:
        return self._binary(bits, arith.shli, None)

    def __rshift__(self, bits: int) -> Scalar:
        return self._binary(bits, arith.shrui, None)

    def _compare(self, other: Any, integer: Any, floating: Any) -> Scalar:
        right = other.value if isinstance(other, Scalar) else _constant(other, self.kind)
        if self.kind == "f32":
            return Scalar(arith.cmpf(floating, self.value, right))
        return Scalar(arith.cmpi(integer, self.value, right))

    def __lt__(self, other: Any) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.slt, arith.CmpFPredicate.OLT)

    def __le__(self, other: Any) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.sle, arith.CmpFPredicate.OLE)

    def __gt__(self, other: Any) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.sgt, arith.CmpFPredicate.OGT)

    def equals(self, other: Any) -> Scalar:
        return self._compare(other, arith.CmpIPredicate.eq, arith.CmpFPredicate.OEQ)

    def i64(self) -> Scalar:
        return self if self.kind == "i64" else Scalar(arith.extui(_type("i64"), self.value))


def i32(value: int | Scalar) -> Scalar:
    return value if isinstance(value, Scalar) else Scalar(_constant(value, "i32"))


def f32(value: float | Scalar) -> Scalar:
    return value if isinstance(value, Scalar) else Scalar(_constant(value, "f32"))


def i64(value: int | Scalar) -> Scalar:
    return value.i64() if isinstance(value, Scalar) else Scalar(_constant(value, "i64"))


def select(predicate: Scalar, then: Any, otherwise: Any) -> Scalar:
    """then where predicate, else otherwise; at most one of the two may be a Python number."""
    kind = then.kind if isinstance(then, Scalar) else otherwise.kind
    sides = [s.value if isinstance(s, Scalar) else _constant(s, kind) for s in (then, otherwise)]
    return Scalar(arith.select(predicate.value, *sides))


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two; works on Python numbers too."""
    if not isinstance(a, Scalar) and not isinstance(b, Scalar):
        return min(a, b)
    return select(a < b, a, b) if isinstance(a, Scalar) else select(b < a, b, a)


def maximum(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two float32 values; NaN loses against a number (max.f32)."""
    return _ptx("max.f32 $0, $1, $2;", a, b, result="f32", pure=True)


# Control flow -------------------------------------------------------------------------------


@contextlib.contextmanager
def when(predicate: Scalar) -> Iterator[None]:
    """Runs the block in the threads whose predicate holds."""
    with mosaic_utils.when(predicate.value):
        yield


def loop(
    lower: int | Scalar, upper: int | Scalar, *carry: Scalar
) -> Callable[[Any], tuple[Scalar, ...]]:
    """`@loop(0, n, a, b)` above `def body(i, a, b): return a, b`; the name is bound to the results.

    The compiler does not see a constant bound: unrolled, a step's loops overflow the instruction
    cache.
    """

    def run(body: Callable[..., Any]) -> tuple[Scalar, ...]:
        if isinstance(lower, int) and isinstance(upper, int) and upper <= lower:
            return carry
        end = _ptx(f"mov.u32 $0, {upper};", result="i32") if isinstance(upper, int) else upper
        bounds = [i32(lower).value, end.value, i32(1).value]
        op = _for(*bounds, [c.value for c in carry])
        with ir.InsertionPoint(op.body):
            out = body(Scalar(op.induction_variable), *map(Scalar, op.inner_iter_args))
            scf.yield_([o.value for o in (out or ())])
        return tuple(map(Scalar, op.results))

    return run


def choose(
    predicate: Scalar, then: Callable[[], Sequence[Scalar]], otherwise: Sequence[Scalar]
) -> list[Scalar]:
    """The results of `then()` in threads where predicate holds, else `otherwise`."""
    op = _if(predicate.value, [o.value.type for o in otherwise], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_([t.value for t in then()])
    with ir.InsertionPoint(op.else_block):
        scf.yield_([o.value for o in otherwise])
    return [Scalar(r) for r in op.results]


def poll(load: Callable[[], list[Scalar]], words: int) -> list[Scalar]:
    """Repeats `load`, of `words` words, until none is NOTHING. Traps after POLL_LIMIT."""
    types = [_type("i32")] * (words + 1)
    op = scf.WhileOp(types, [i32(0).value])
    before = op.before.blocks.append(_type("i32"))
    after = op.after.blocks.append(*types)
    with ir.InsertionPoint(before):
        values = load()
        largest = functools.reduce(_max_unsigned, values)
        count = Scalar(before.arguments[0]) + 1
        missing = largest.equals(NOTHING)
        scf.condition(missing.value, [*(v.value for v in values), count.value])
    with ir.InsertionPoint(after):
        count = Scalar(after.arguments[words])
        with when(count > POLL_LIMIT):
            _ptx("trap;")
        scf.yield_([count.value])
    return [Scalar(r) for r in list(op.results)[:words]]


def _max_unsigned(a: Scalar, b: Scalar) -> Scalar:
    return Scalar(arith.maxui(a.value, b.value))


# PTX ----------------------------------------------------------------------------------------


def _ptx(text: str, *args: Scalar, result: str | Sequence[str] | None = None, pure: bool = False,
         convergent: bool = False) -> Any:  # fmt: skip
    """One inline PTX statement. Impure by default: LLVM then keeps its order against the others."""
    values = [a.value for a in args]
    if result is None:
        mosaic_utils.inline_ptx(text, *values, has_side_effects=True, convergent=convergent)
        return None
    types = [_type(k) for k in ([result] if isinstance(result, str) else result)]
    out = mosaic_utils.inline_ptx(
        text, *values, result_types=types, has_side_effects=not pure, convergent=convergent
    )
    scalars = [Scalar(v) for v in cast(Sequence[ir.Value], out)]
    return scalars[0] if isinstance(result, str) else scalars


def address(memref: ir.Value) -> Scalar:
    """Byte address of a memref: i32 in the shared window, i64 in global memory."""
    pointer = mosaic_utils.memref_ptr(memref)
    shared = mosaic_utils.is_smem_ref(memref)
    return Scalar(llvm.ptrtoint(_type("i32" if shared else "i64"), pointer))


def elected() -> Scalar:
    """True in one lane of a converged warp."""
    return Scalar(nvvm.elect_sync())


def thread_index() -> Scalar:
    return _ptx("mov.u32 $0, %tid.x;", result="i32", pure=True)


def block_index() -> Scalar:
    return _ptx("mov.u32 $0, %ctaid.x;", result="i32", pure=True)


def uniform(value: Scalar) -> Scalar:
    """The value of lane 0 in every lane; tells the compiler that the warp agrees on it."""
    if value.kind == "i64":
        low, high = (Scalar(arith.trunci(_type("i32"), v.value)) for v in (value, value >> 32))
        return uniform(low).i64() | (uniform(high).i64() << 32)
    return _ptx(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", value, result="i32", convergent=True
    )


def shuffle_xor(value: Scalar, distance: int) -> Scalar:
    """The value of lane (own lane ^ distance)."""
    bits = value if value.kind == "i32" else Scalar(arith.bitcast(_type("i32"), value.value))
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    out = _ptx(text, bits, result="i32", convergent=True)
    return out if value.kind == "i32" else as_f32(out)


def fold(lane: Scalar, values: list[Scalar], distances: tuple[int, ...]) -> list[Scalar]:
    """Sums each value over the lanes that differ in the bits `distances`.

    While more than one value is left, each step also deals the values out: lanes without the bit
    keep the first half, lanes with it the second. So n values cost about n shuffles, not n a bit.
    """
    for distance in distances:
        if len(values) == 1:
            values = [values[0] + shuffle_xor(values[0], distance)]
            continue
        half = len(values) // 2
        upper = (lane & distance).equals(distance)
        pairs = zip(values[:half], values[half:], strict=True)
        values = [
            select(upper, b, a) + shuffle_xor(select(upper, a, b), distance) for a, b in pairs
        ]
    return values


def as_f32(bits: Scalar) -> Scalar:
    return Scalar(arith.bitcast(_type("f32"), bits.value))


def as_i32(value: Scalar) -> Scalar:
    return Scalar(arith.bitcast(_type("i32"), value.value))


def unpack_bf16(word: Scalar) -> tuple[Scalar, Scalar]:
    """The two bf16 of a word, low half first, as float32."""
    return as_f32(word << 16), as_f32(word & -65536)


def pack_bf16(low: Scalar, high: Scalar) -> Scalar:
    """Two float32 rounded to bf16 in one word (cvt.rn.bf16x2.f32; NaN becomes 0x7fff)."""
    return _ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result="i32", pure=True)


def exp2(x: Scalar) -> Scalar:
    return _ptx("ex2.approx.ftz.f32 $0, $1;", x, result="f32", pure=True)


def reciprocal(x: Scalar) -> Scalar:
    return _ptx("rcp.approx.ftz.f32 $0, $1;", x, result="f32", pure=True)


def rsqrt(x: Scalar) -> Scalar:
    return _ptx("rsqrt.approx.ftz.f32 $0, $1;", x, result="f32", pure=True)


def fma(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    return _ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, result="f32", pure=True)


def load_shared(where: Scalar, kind: str = "i32") -> Scalar:
    suffix = {"i32": "u32", "f32": "f32", "i64": "u64"}[kind]
    return _ptx(f"ld.shared.{suffix} $0, [$1];", where, result=kind)


def load_shared_4(where: Scalar, kind: str = "i32") -> list[Scalar]:
    """16 bytes as four words."""
    suffix = {"i32": "u32", "f32": "f32"}[kind]
    return _ptx(f"ld.shared.v4.{suffix} {{$0, $1, $2, $3}}, [$4];", where, result=[kind] * 4)


def store_shared(where: Scalar, value: Scalar) -> None:
    suffix = {"i32": "u32", "f32": "f32", "i64": "u64"}[value.kind]
    _ptx(f"st.shared.{suffix} [$0], $1;", where, value)


def store_shared_4(where: Scalar, words: Sequence[Scalar]) -> None:
    _ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", where, *words)


def load_global(where: Scalar, kind: str = "i32") -> Scalar:
    return _ptx(f"ld.global.{'f32' if kind == 'f32' else 'u32'} $0, [$1];", where, result=kind)


def store_global(where: Scalar, value: Scalar) -> None:
    _ptx(f"st.global.{'f32' if value.kind == 'f32' else 'u32'} [$0], $1;", where, value)


def send(where: Scalar, word: Scalar) -> None:
    """Makes a word visible to every block (st.relaxed.gpu)."""
    _ptx("st.relaxed.gpu.global.u32 [$0], $1;", where, word if word.kind == "i32" else as_i32(word))


def receive_4(where: Scalar) -> list[Scalar]:
    """Four words as the level-2 cache has them now (ld.relaxed.gpu bypasses level 1)."""
    return _ptx("ld.relaxed.gpu.global.v4.u32 {$0, $1, $2, $3}, [$4];", where, result=["i32"] * 4)


def receive_2(where: Scalar) -> list[Scalar]:
    return _ptx("ld.relaxed.gpu.global.v2.u32 {$0, $1}, [$2];", where, result=["i32"] * 2)


def sync_block() -> None:
    _ptx("barrier.sync 0;", convergent=True)


def sync_threads(barrier: int, threads: int) -> None:
    """Waits for `threads` threads on one of the 16 hardware barriers.

    Not the aligned form bar.sync: that one counts whole warps, so a warp still divergent after a
    poll would arrive twice and let the others through early.
    """
    _ptx(f"barrier.sync {barrier}, {threads};", convergent=True)


def sync_warp() -> None:
    _ptx("bar.warp.sync 0xffffffff;", convergent=True)


def fence_async_proxy() -> None:
    """Orders this thread's shared-memory accesses before those of copy engine and tensor core."""
    _ptx("fence.proxy.async.shared::cta;")


def barrier_init(barrier: Scalar, arrivals: int) -> None:
    _ptx(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", barrier)


def barrier_arrive(barrier: Scalar) -> None:
    _ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", barrier)


def barrier_expect(barrier: Scalar, size_bytes: int) -> None:
    """Arrives and announces `size_bytes` of copies that end on this barrier."""
    _ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size_bytes};", barrier)


def barrier_wait(barrier: Scalar, parity: Scalar | int) -> None:
    """Waits until the barrier's phase of that parity is over."""
    _ptx(
        "{ .reg .pred done; RETRY: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
        " @!done bra RETRY; }",
        barrier,
        i32(parity),
        convergent=True,
    )


def barrier_wait_after(
    before: Scalar, before_parity: Scalar, barrier: Scalar, parity: Scalar
) -> None:
    """`barrier_wait(barrier, parity)` that also holds until `before`'s phase is over.

    The two tests overlap, so the second costs nothing.
    """
    _ptx(
        "{ .reg .pred done, old; RETRY: mbarrier.test_wait.parity.shared::cta.b64 old, [$0], $1;"
        " mbarrier.try_wait.parity.shared::cta.b64 done, [$2], $3; and.pred done, done, old;"
        " @!done bra RETRY; }",
        before, before_parity, barrier, parity,
        convergent=True,
    )  # fmt: skip


def evict_first_policy() -> Scalar:
    return _ptx("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", result="i64")


def copy_in(target: Scalar, source: Scalar, size_bytes: int, barrier: Scalar,
            policy: Scalar | None) -> None:  # fmt: skip
    """Starts copying contiguous global to shared memory; ends on `barrier` (cp.async.bulk)."""
    hint, operand, args = (
        (".L2::cache_hint", ", $3", [policy]) if policy is not None else ("", "", [])
    )
    _ptx(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
        f" [$0], [$1], {size_bytes}, [$2]{operand};",
        target, source, barrier, *args,
    )  # fmt: skip


def matrix_descriptor(row_group_bytes: int) -> tuple[int, int]:
    """Low and high word of a wgmma shared-memory descriptor without swizzle, K-major, at address 0.

    Core matrices (8 rows of 16 bytes, 128 contiguous bytes) are 128 bytes apart along K and
    `row_group_bytes` apart along M or N. The address in units of 16 bytes goes into the low word.
    """
    return (128 >> 4) << 16, row_group_bytes >> 4


def wgmma(
    accumulators: Sequence[Scalar], a: tuple[Scalar, int], b: tuple[Scalar, int], steps: int,
    chains: int, accumulate: bool,
) -> list[Scalar]:  # fmt: skip
    """Adds `steps` products m64 nN k16 of bf16 tiles and waits for them.

    a, b: (low, high) descriptor of the first step; each further one lies 256 bytes on.
    Steps are dealt to `chains` accumulators of N / 2 registers each, which follow one another.
    """
    total, count = len(accumulators), len(accumulators) // chains
    shape = f"m64n{2 * count}k16.f32.bf16.bf16"
    lines = [f"mov.u32 a, ${2 * total};", f"mov.u32 b, ${2 * total + 1};"]
    lines += [f"setp.ne.b32 keep, {int(accumulate)}, 0;", "setp.eq.b32 always, 0, 0;"]
    lines += ["wgmma.fence.sync.aligned;"]
    for step in range(steps):
        first = step % chains * count
        registers = "{" + ",".join(f"${first + i}" for i in range(count)) + "}"
        scale = "keep" if step < chains else "always"
        lines += [f"mov.b64 da, {{a, {a[1]}}};", f"mov.b64 db, {{b, {b[1]}}};"]
        lines += [f"wgmma.mma_async.sync.aligned.{shape} {registers}, da, db, {scale}, 1, 1, 0, 0;"]
        lines += ["add.u32 a, a, 16;", "add.u32 b, b, 16;"]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    text = "{ .reg .b32 a, b; .reg .b64 da, db; .reg .pred keep, always; " + " ".join(lines) + " }"
    constraints = ",".join(["=f"] * total + [str(i) for i in range(total)] + ["r", "r"])
    result = llvm.inline_asm(
        llvm.StructType.get_literal([_type("f32")] * total),
        [*(x.value for x in accumulators), uniform(a[0]).value, uniform(b[0]).value],
        text,
        constraints,
        has_side_effects=True,
        convergent=True,
    )
    return [Scalar(llvm.extractvalue(_type("f32"), result, [i])) for i in range(total)]
