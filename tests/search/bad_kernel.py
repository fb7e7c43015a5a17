"""A matmul kernel for a CPU whose schedule says how it misbehaves. Not in the catalogue."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Op, Schedule, Workload, Writes
from polyjax.core.ops import MATMUL

MODES = ("slow", "aborts", "fast", "twin", "wrong", "hang", "slower", "raises", "illegal")


@dataclasses.dataclass(frozen=True)
class BadSchedule(Schedule):
    mode: str = "slow"


@dataclasses.dataclass(frozen=True)
class BadMatmul:
    """fast and twin are the same code; aborts is as fast, and dies when all gates judge it."""

    name: str = "tests.search.bad_kernel:KERNEL"
    op: Op = MATMUL
    platform: str = "cpu"
    requires: frozenset[str] = frozenset()
    schedule_type: ClassVar[type[Schedule]] = BadSchedule

    def supports(self, workload: Workload) -> str | None:
        return None

    def preferred(self, workload: Workload) -> bool:
        return False

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[Schedule]:
        yield from map(BadSchedule, MODES)

    def default(self, workload: Workload, chip: ChipSpec) -> Schedule:
        return BadSchedule()

    def check(self, workload: Workload, schedule: Any, chip: ChipSpec) -> None:
        if schedule.mode == "illegal":
            raise ScheduleError("the mode is illegal")

    def shared_memory_bytes(self, workload: Workload, schedule: Schedule) -> int:
        return 0

    def writes(self, workload: Workload, schedule: Schedule) -> Iterator[Writes]:
        yield Writes(0, (0, 0), (workload["M"], workload["N"]))

    def build(self, workload: Workload, schedule: Any) -> Callable[..., Any]:
        mode = schedule.mode
        if mode == "raises":
            raise ValueError("this schedule does not build")
        if mode == "aborts" and "measurer" in sys.argv:
            os.abort()

        def matmul(x: Any, w: Any, bias: Any = None, residual: Any = None) -> jax.Array:
            y = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32).T)
            if mode == "aborts":
                y = y.T.astype(jnp.float32).T * jnp.float32(1.0 + 2.0**-24 * 4)
            if mode == "wrong":
                y = y * 1.5
            elif mode == "hang":  # an endless loop that no compiler can see the end of
                y = jax.lax.while_loop(lambda v: v[0, 0] < jnp.inf, lambda v: v * 0.5, y)
            elif mode in ("slow", "slower"):
                again = lambda _, v: jax.lax.optimization_barrier(v * 1.0)  # noqa: E731
                y = jax.lax.fori_loop(0, 5_000 if mode == "slow" else 50_000, again, y)
            for addend in (bias, residual):
                y = y if addend is None else y + addend.astype(jnp.float32)
            return y.astype(workload.option("out_dtype") or x.dtype)

        return matmul


KERNEL = BadMatmul()
