"""Compiles candidate schedules in worker processes and times them as L2-cold chains on the device.

Lowering holds the interpreter lock, so workers compile and hand back serialized executables; the
parent loads, times and checks them one by one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

from pallas_kernels import CATALOGUE
from pallas_kernels.base import f32
from pallas_kernels.timing import Chain
from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Kernel, Schedule, Workload

TINY = 1e-30  # makes a link depend on the one before without changing a bfloat16 value

# What links one call to the next: the new activations from the old, or the running output.
LINKS = ("activation", "output")


def candidates(
    kernel: Kernel, workload: Workload, chip: ChipSpec, count: int, seed: int = 0
) -> list[Schedule]:
    """Returns `count` legal schedules: the default, the best ranked of other families, a draw.

    Families differ in how they split the work (`MosaicGpuKernel.family`). The rest is drawn by seed
    from the better half of the ranking, so that a small budget is not spent on schedules that leave
    most of the chip idle.
    """
    if kernel.supports(workload) is not None:
        return []
    legal = [s for s in kernel.space(workload, chip) if _legal(kernel, workload, s, chip)]
    rank = getattr(kernel, "rank", lambda *_: ())
    legal.sort(key=lambda s: rank(workload, s, chip), reverse=True)  # stable: ties keep their order
    default = kernel.default(workload, chip)
    family = getattr(kernel, "family", lambda _: ())
    best = {family(s): s for s in reversed(legal)}  # of equal families the higher ranked stays
    best.pop(family(default), None)
    others = sorted(best.values(), key=legal.index)
    ranked = [s for s in (default,) if s in legal] + others[: max(1, (count - 1) * 2 // 3)]
    rest = [s for s in legal[: max(count, len(legal) // 2)] if s not in ranked]
    drawn = random.Random(seed).sample(rest, max(0, min(count - len(ranked), len(rest))))
    return [*ranked, *drawn][:count]


def _legal(kernel: Kernel, workload: Workload, schedule: Schedule, chip: ChipSpec) -> bool:
    try:
        kernel.check(workload, schedule, chip)
    except ScheduleError:
        return False
    return True


def linked(call: Callable[..., Any], varied: int, link: str, carried: int) -> Callable[..., Any]:
    """Returns f(sets, *arguments): `call` once per set, the set in place of argument `varied`.

    link "output": argument `carried` of a call is the result of the one before. "activation":
    argument 0 depends on the result before, by an addend too small to change it.
    """
    one = jax.jit(call)  # one trace and one lowering for all links

    def chain(sets: Sequence[Any], *arguments: Any) -> Any:
        values = list(arguments)
        result = None
        for each in sets:
            values[varied] = each
            result = one(*values)
            if link == "output":
                values[carried] = result
            else:
                nudge = jax.tree.leaves(result)[0].reshape(-1)[:1].astype(jnp.float32) * TINY
                moved = values[0] + nudge.astype(values[0].dtype)
                values[0] = jax.lax.optimization_barrier(moved)
        return result

    return chain


def _compile_in_worker(
    kernel: str,
    workload: Workload,
    schedule: dict[str, Any],
    chained: tuple[int, str, int],
    shapes: Any,
) -> tuple[bytes, Any, Any]:
    implementation = CATALOGUE[kernel]
    call = implementation.build(workload, implementation.schedule_type.from_json(schedule))
    compiled = jax.jit(linked(call, *chained)).lower(*shapes).compile()
    return serialize_executable.serialize(compiled)


def xla_matmul(
    form: str, x: jax.Array, w: jax.Array, bias: Any = None, residual: Any = None
) -> jax.Array:
    """The matmul op as XLA may compute it: on [N,K], on [K,N], or as a multiply and reduce."""
    if form == "reduce":
        y = jnp.sum(x.astype(f32)[:, None] * w.astype(f32)[None], -1)
    else:
        contract = (((1,), (1 if form == "[N,K]" else 0,)), ((), ()))
        y = jax.lax.dot_general(x, w, contract, preferred_element_type=f32)
    for addend in (bias, residual):
        y = y if addend is None else y + addend.astype(f32)
    return y.astype(x.dtype)


def _compile_xla_in_worker(
    form: str, chained: tuple[int, str, int], shapes: Any
) -> tuple[bytes, Any, Any]:
    call = functools.partial(xla_matmul, form)
    compiled = jax.jit(linked(call, *chained)).lower(*shapes).compile()
    return serialize_executable.serialize(compiled)


def _shapes(arguments: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)


class CompilePool:
    """Worker processes that compile chains; use as a context manager."""

    def __init__(self, workers: int | None = None):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers or os.cpu_count(), mp_context=spawn)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(
        self,
        kernel: Kernel,
        workload: Workload,
        schedule: Schedule,
        chained: tuple[int, str, int],
        arguments: tuple[Any, ...],
    ) -> Future[tuple[bytes, Any, Any]]:
        """Starts compiling; `chained` are `linked`'s (varied, link, carried)."""
        job = (kernel.name, workload, schedule.to_json(), chained, _shapes(arguments))
        return self._pool.submit(_compile_in_worker, *job)

    def submit_xla(
        self, form: str, chained: tuple[int, str, int], arguments: tuple[Any, ...]
    ) -> Future[tuple[bytes, Any, Any]]:
        """Starts compiling a chain of `xla_matmul`; XLA times its own candidates as it compiles."""
        return self._pool.submit(_compile_xla_in_worker, form, chained, _shapes(arguments))


def load_chain(name: str, future: Future[Any], arguments: tuple[Any, ...]) -> Chain | str:
    """Returns the compiled chain, or why the candidate failed to compile."""
    try:
        payload, in_tree, out_tree = future.result()
        compiled = serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, execution_devices=jax.devices()[:1]
        )
    except Exception as error:  # a failed candidate is a result, not an error
        return " ".join(repr(error).split())[:200]
    return Chain(name, compiled, arguments, len(arguments[0]))
