"""A candidate step program for the gate score: the twin's matmuls by a plain kernel in the plan.

On a CPU no catalogue kernel lowers, but a plan that names one is what gates are for: presence is
proven against `used` and compiled text, and results differ from the reference's within rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp

from polyjax.compiler import program as programs
from polyjax.compiler.program import ProgramKey, ProgramRequest, StepProgram, compile_program
from polyjax.compiler.state import StateSpec
from polyjax.core.chips import ChipSpec
from polyjax.core.mesh import MeshPlan
from polyjax.core.op import Choice, Op, Schedule, Workload, Writes
from polyjax.core.ops import MATMUL
from polyjax.core.plan import Plan


@dataclasses.dataclass(frozen=True)
class SplitSchedule(Schedule):
    """The reduction is summed in pieces of `tile_k`."""

    tile_k: int = 16


@dataclasses.dataclass(frozen=True)
class PlainMatmul:
    """Matmul in plain jnp, the reduction in pieces; a `polyjax.core.op.Kernel` for a CPU."""

    name: str = "plain.matmul"
    op: Op = MATMUL
    platform: str = "cpu"
    requires: frozenset[str] = frozenset()
    schedule_type: ClassVar[type[Schedule]] = SplitSchedule

    def supports(self, workload: Workload) -> str | None:
        return None

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[Schedule]:
        yield from (SplitSchedule(tile_k) for tile_k in (8, 16, 32, 64))

    def default(self, workload: Workload, chip: ChipSpec) -> Schedule:
        return SplitSchedule()

    def check(self, workload: Workload, schedule: Schedule, chip: ChipSpec) -> None:
        return None

    def shared_memory_bytes(self, workload: Workload, schedule: Schedule) -> int:
        return 0

    def writes(self, workload: Workload, schedule: Schedule) -> Iterator[Writes]:
        yield Writes(0, (0, 0), (workload["M"], workload["N"]))

    def build(self, workload: Workload, schedule: Any) -> Callable[..., Any]:
        step = schedule.tile_k

        def matmul(x: Any, w: Any, bias: Any = None, residual: Any = None) -> jax.Array:
            y = jnp.zeros((x.shape[0], w.shape[0]), jnp.float32)
            for k in range(0, x.shape[1], step):
                part = slice(k, k + step)
                y = y + x[:, part].astype(jnp.float32) @ w[:, part].astype(jnp.float32).T
            for addend in (bias, residual):
                y = y if addend is None else y + addend.astype(jnp.float32)
            return y.astype(workload.option("out_dtype") or x.dtype)

        return matmul


@functools.cache
def candidate_program(
    spec: StateSpec, incumbent: StepProgram, schedule: SplitSchedule
) -> StepProgram:
    """`incumbent`'s program with every matmul by the plain kernel."""
    kernel = PlainMatmul()
    choice = Choice(kernel.name, tuple(schedule.to_json().items()))
    choices = {key: choice for key, _ in incumbent.used if key.startswith("matmul[")}
    request = ProgramRequest(spec, Plan(choices=tuple(sorted(choices.items()))), incumbent.key)
    with mock.patch.object(programs, "CATALOGUE", {kernel.name: kernel}):
        return compile_program(request, MeshPlan().mesh())


def candidate_key(kind: str, known: dict[ProgramKey, StepProgram]) -> ProgramKey:
    """The key of the twin's program of a kind, e.g. "decode_greedy"."""
    return next(key for key in known if key.kind.value == kind)
