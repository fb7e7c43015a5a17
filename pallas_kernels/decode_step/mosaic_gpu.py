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

from pallas_kernels.base import WARPGROUP_THREADS, MosaicGpuKernel
from pallas_kernels.decode_step import device, legality
from pallas_kernels.decode_step.body import Arguments, Body
from pallas_kernels.decode_step.layout import DecodeSchedule, Exchange, SharedMemory, Step
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Schedule, Workload, Writes
from polyjax.core.ops import DENSE_DECODE_GREEDY, DENSE_DECODE_STACK

HOPPER_SHARED_BYTES = 227 * 1024  # of every chip with wgmma


@dataclasses.dataclass(frozen=True)
class DecodeStep(MosaicGpuKernel):
    """See the module docstring."""

    schedule_type: ClassVar[type[Schedule]] = DecodeSchedule

    def preferred(self, workload: Workload) -> bool:
        """1B batch 1: 697 us against plain JAX's 1029; 8B batch 1: 0.91 of read bandwidth."""
        return True

    def supports(self, workload: Workload) -> str | None:
        reason = legality.unsupported(workload)
        if reason:
            return reason
        schedule = legality.best_fit(workload, HOPPER_SHARED_BYTES)
        if schedule is None:
            return "activations leave no room for two tiles of weights"
        return legality.broken_rule(workload, schedule)

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[DecodeSchedule]:
        blocks = legality.blocks_of(workload) or 128
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

    def default(self, workload: Workload, chip: ChipSpec) -> DecodeSchedule:
        schedule = legality.best_fit(workload, chip.shared_memory_bytes)
        assert schedule is not None, f"{chip.name} has less shared memory than `supports` assumes"
        return schedule

    def illegal(self, workload: Workload, schedule: Any, chip: ChipSpec) -> str | None:
        if schedule.blocks > chip.num_sms:
            limit = f"{chip.name} runs {chip.num_sms} at once"
            return f"{schedule.blocks} blocks wait for each other, {limit}"
        return legality.broken_rule(workload, schedule)

    def shared_memory_bytes(self, workload: Workload, schedule: Any) -> int:
        return legality.shared_memory_bytes(workload, schedule)

    def launch_shape(self, workload: Workload, schedule: Any) -> LaunchShape:
        """Blocks exchange activations five times a layer: norms, q with k and v, heads, ffw."""
        w, step = workload, Step.of(workload, schedule)
        moved = self.op.bytes_moved(w) if self.op.bytes_moved else 0.0
        head = -(-step.vocab_groups // schedule.blocks) * step.head_chunks if step.vocab else 0
        tiles = w["L"] * step.layer_tiles + head
        return LaunchShape(
            schedule.blocks,
            (schedule.warpgroups + 1) * WARPGROUP_THREADS,
            4 * w["B"] * schedule.chains + step.group * 10 + 40,
            moved,
            float(min(schedule.in_flight, schedule.stages) * step.tile_bytes),
            steps=-(-tiles // schedule.warpgroups),
            syncs=5 * w["L"] + (1 if step.vocab else 0),
            flops=tiles * schedule.blocks * 2.0 * 64 * step.tile_bytes / 2,
            kernels=2,  # XLA fills the exchange buffer
        )

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
