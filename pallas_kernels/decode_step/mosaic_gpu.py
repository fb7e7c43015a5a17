"""The persistent decode step as two kernels: the layer stack, and the stack with a greedy head.

One Mosaic GPU kernel runs every layer of a dense decoder for one new token a row. Weights are read
in place in the engine's [N,K] layout, pools are updated in place. `layout` says who computes what,
`body` and `attention` what every thread does, `emulation` the same arithmetic in numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.base import MosaicGpuKernel
from pallas_kernels.decode_step import device
from pallas_kernels.decode_step.body import Arguments, Body
from pallas_kernels.decode_step.layout import (
    FOLD_COLUMNS,
    GROUP_ROWS,
    DecodeSchedule,
    Exchange,
    SharedMemory,
    Step,
)
from polyjax.core.op import ChipLike, Schedule, Workload, Writes
from polyjax.core.ops import DENSE_DECODE_GREEDY, DENSE_DECODE_STACK

STATIC_SHARED_BYTES = 1024  # what Mosaic GPU itself takes
MAX_BATCH = 16  # N = 8 * batch columns, and a lane each for 2 * batch traces
BF16_ARGUMENTS = ("x", "attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down", "kv")


@dataclasses.dataclass(frozen=True)
class DecodeStep(MosaicGpuKernel):
    """See the module docstring."""

    schedule_type: ClassVar[type[Schedule]] = DecodeSchedule

    def supports(self, workload: Workload) -> str | None:
        w = workload
        wrong = [n for n in BF16_ARGUMENTS if w.dtype(n) != jnp.bfloat16]
        if wrong:
            return f"{', '.join(wrong)}: only bfloat16"
        if w["B"] > MAX_BATCH:
            return f"batch {w['B']}: at most {MAX_BATCH}"
        if w["H"] not in (64, 128) or w["R"] != w["H"]:
            return f"head dim {w['H']} with {w['R']} rotated: only 64 and 128, all rotated"
        if w["G"] - 2 not in (1, 2, 4, 8):
            return f"{w['G'] - 2} query heads a kv head: only 1, 2, 4, 8"
        if w["N"] != w["K"] * (w["G"] - 2) * w["H"]:
            return f"o takes {w['N']} columns, not kv heads x group x head dim"
        if w.get("V") % GROUP_ROWS:
            return f"vocabulary {w['V']} is no multiple of {GROUP_ROWS}"
        if self._blocks(w) is None:
            return "no number of blocks divides every projection's rows by 8"
        return None

    def _blocks(self, w: Workload) -> int | None:
        rows = (w["K"] * w["G"] * w["H"], w["D"], w["F"])
        return next((n for n in (128, 64, 32, 16, 8) if all(r % (n * 8) == 0 for r in rows)), None)

    def space(self, workload: Workload, chip: ChipLike) -> Iterator[DecodeSchedule]:
        blocks = self._blocks(workload) or 128
        knobs = itertools.product(
            (1024, 2048), (1, 2, 3), (4, 5, 7, 9, 11), (2, 3, 4, 6), (1, 2), (1, 2, 4), (32, 64)
        )
        for chunk, warpgroups, stages, in_flight, kv_stages, down_parts, hint_copies in knobs:
            for chains in (1, 2):
                yield DecodeSchedule(
                    blocks=blocks, warpgroups=warpgroups, chunk=chunk, stages=stages,
                    in_flight=in_flight, kv_stages=kv_stages, down_parts=down_parts,
                    hint_copies=min(hint_copies, blocks), chains=chains,
                )  # fmt: skip

    def default(self, workload: Workload, chip: ChipLike) -> DecodeSchedule:
        """As many tiles in flight as fit; fewer, wider blocks of columns where rows are many."""
        blocks = self._blocks(workload) or 128
        columns = (workload["D"], workload["N"], workload["F"])
        chunk = next(c for c in (1024, 512, 256, 128) if all(k % c == 0 for k in columns))
        pages = -(-workload["C"] * workload["B"] * workload["K"] // blocks)
        best = None
        for down_parts in _divisors(workload["F"] // chunk):
            for stages in range(2, 25):
                schedule = DecodeSchedule(
                    blocks=blocks, warpgroups=2, chunk=chunk, stages=stages,
                    kv_stages=min(2, max(1, pages)), down_parts=down_parts,
                    hint_copies=min(32, blocks),
                )  # fmt: skip
                needed = self.shared_memory_bytes(workload, schedule)
                if needed > chip.shared_memory_bytes:
                    break
                best = schedule
            if best is not None and best.stages * GROUP_ROWS * 2 * chunk >= 96 * 1024:
                break
        assert best is not None, "shared memory too small for two tiles"
        return best

    def illegal(self, workload: Workload, schedule: Any, chip: ChipLike) -> str | None:
        w, s = workload, schedule
        if s.blocks > chip.num_sms:
            return f"{s.blocks} blocks wait for each other, {chip.name} runs {chip.num_sms} at once"
        if s.blocks % 4 or s.blocks > 128 or s.blocks < 8:
            return f"{s.blocks} blocks: a multiple of 4 from 8 to 128"
        if s.warpgroups not in (1, 2, 3, 4):
            return f"{s.warpgroups} consumer warpgroups: 1 to 4"
        if (
            s.chunk % FOLD_COLUMNS
            or s.down_parts < 1
            or s.stages < s.warpgroups
            or min(s.kv_stages, s.in_flight) < 1
        ):
            return f"chunk {s.chunk} is no multiple of {FOLD_COLUMNS}, or a count is too small"
        for name, rows in (("qkv", w["K"] * w["G"] * w["H"]), ("o", w["D"]), ("gate_up", w["F"])):
            if rows % (s.blocks * GROUP_ROWS):
                return f"{rows} rows of {name} do not divide into {s.blocks} blocks of groups of 8"
        for name, columns in (("qkv", w["D"]), ("o", w["N"]), ("down", w["F"] // s.down_parts)):
            if columns % s.chunk:
                return f"{columns} columns of {name} are no multiple of the chunk {s.chunk}"
        if w["F"] % s.down_parts:
            return f"{w['F']} columns of down do not divide into {s.down_parts} parts"
        step = Step.of(w, s)
        half = step.embed_rows // 2
        if half & (half - 1) or half > 32:
            return f"{step.embed_rows} rows of x a block: a power of two up to 64"
        if step.pairs > s.blocks:
            return f"{step.pairs} (row, kv head) pairs need as many blocks"
        share = step.group_dim // step.splits
        if share < 4 or share & (share - 1):
            return f"{step.splits} splits leave {share} dims to combine a block"
        if step.group_dim < 64:
            return f"{step.group_dim} dims of a kv head's queries: at least 64"
        if (
            s.chains not in (1, 2)
            or not 1 <= s.hint_copies <= s.blocks
            or step.pairs * step.splits % 4
        ):
            return (
                "1 or 2 chains, hint copies up to the blocks, a multiple of 4 blocks in attention"
            )
        registers = 4 * w["B"] * s.chains + step.group * 10 + 40
        if (s.warpgroups + 1) * 128 * registers > 65536:
            return f"about {registers} registers a thread do not fit {s.warpgroups} warpgroups"
        return None

    def shared_memory_bytes(self, workload: Workload, schedule: Any) -> int:
        return SharedMemory(Step.of(workload, schedule)).total_bytes + STATIC_SHARED_BYTES

    def outputs(self, workload: Workload, schedule: Any) -> tuple[tuple[int, ...], ...]:
        w = workload
        return ((w["B"], w["D"]), (w["L"], w["B"], w["K"], 2, w["H"]))

    def writes(self, workload: Workload, schedule: Any) -> Iterator[Writes]:
        """Rows of x by their owner; the new keys and values by the block with the newest page."""
        w, step = workload, Step.of(workload, schedule)
        for block in range(schedule.blocks):
            start = step.weight_row("o", block, 0)
            yield Writes(0, (0, start), (w["B"], step.embed_rows))
        for pair in range(step.pairs):
            row, head = pair // w["K"], pair % w["K"]
            yield Writes(1, (0, row, head, 0, 0), (w["L"], 1, 1, 2, w["H"]))

    def build(self, workload: Workload, schedule: Any) -> Callable[..., Any]:
        step = Step.of(workload, schedule)
        return _greedy(step) if step.vocab else _stack(step)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _stack(step: Step) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        (x,), pools = _call(step, args, None, None)
        return x, pools

    return run


def _greedy(step: Step) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        *stack, final_norm, head = args
        (x, tokens), pools = _call(step, tuple(stack), final_norm, head)
        return tokens, x, pools

    return run


def _call(
    step: Step, args: tuple[Any, ...], final_norm: jax.Array | None, head: jax.Array | None
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Runs the kernel. Returns ((x, tokens if there is a head), pools)."""
    x, attn_norm, qkv, o, mlp_norm, gate_up, down, kv, cos_sin, page_table, context_lens = args
    norms = [n for pair in zip(attn_norm, mlp_norm, strict=True) for n in pair]
    # Without a head the last norm's result is sent but never read: any norm will do.
    norms.append(attn_norm[0] if final_norm is None else final_norm)
    pools = tuple(jax.new_ref(pool) for pool in kv)
    exchange = jax.new_ref(jnp.full((Exchange(step).words,), device.NOTHING, jnp.int32))
    inputs: dict[str, Any] = {
        "x": x, "norms": tuple(norms), "qkv": tuple(qkv), "o": tuple(o), "gate_up": tuple(gate_up),
        "down": tuple(down),
        "kv": pools, "cos_sin": cos_sin, "page_table": page_table, "context_lens": context_lens,
        "exchange": exchange,
    }  # fmt: skip
    out_type = [jax.ShapeDtypeStruct((step.batch, step.embed_dim), jnp.bfloat16)]
    if head is not None:
        inputs["head"] = head
        out_type.append(jax.ShapeDtypeStruct((step.batch,), jnp.int32))
    flat, tree = jax.tree.flatten(inputs)

    def decode_step(*refs: Any, shared: Any) -> None:
        """Hands every reference over to the per-thread code."""
        named = jax.tree.unflatten(tree, refs[: len(flat)])
        named["out"] = tuple(refs[len(flat) :])
        leaves, structure = jax.tree.flatten((named, shared))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(leaves))
        def emit(_context: Any, *memrefs: Any) -> None:
            named, memory = jax.tree.unflatten(structure, memrefs)
            Body(step, _arguments(named), device.address(memory)).emit()

        emit(*leaves)

    run = plgpu.kernel(
        decode_step,
        out_type=tuple(out_type),
        grid=(step.schedule.blocks,),
        grid_names=("block",),
        num_threads=step.schedule.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={"shared": plgpu.SMEM((SharedMemory(step).total_bytes // 4,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    outs = run(*flat)
    return tuple(outs), tuple(jax.freeze(pool) for pool in pools)


def _arguments(named: dict[str, Any]) -> Arguments:
    get = lambda name: device.address(named[name])  # noqa: E731
    each = lambda name: tuple(device.address(m) for m in named[name])  # noqa: E731
    x_out, *tokens = (device.address(m) for m in named["out"])
    return Arguments(
        x=get("x"),
        norms=each("norms"),
        weights={name: each(name) for name in ("qkv", "o", "gate_up", "down")},
        kv=each("kv"),
        cos_sin=get("cos_sin"),
        page_table=get("page_table"),
        context_lens=get("context_lens"),
        head=get("head") if "head" in named else None,
        exchange=get("exchange"),
        x_out=x_out,
        tokens=tokens[0] if tokens else None,
    )


_REQUIRES = frozenset({"wgmma", "tma"})
STACK = DecodeStep("mosaic_gpu.dense_decode_stack.persistent", DENSE_DECODE_STACK, _REQUIRES)
GREEDY = DecodeStep("mosaic_gpu.dense_decode_greedy.persistent", DENSE_DECODE_GREEDY, _REQUIRES)
