"""Which workloads the steps of a plan consist of, found by tracing shapes; compiles nothing."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from pallas_kernels import CATALOGUE
from polyjax.compiler.choose import DefaultingOps, defaults_for
from polyjax.compiler.program import ProgramRequest, abstract_call
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Choice, Op, Ops, Workload


class _Recorder(DefaultingOps):
    """Computes shapes by the references; looks into a composite op unless the plan takes it."""

    def __init__(self, choices: Mapping[str, Choice], chip: ChipSpec | None):
        super().__init__(choices, CATALOGUE, chip)
        self.calls: collections.Counter[Workload] = collections.Counter()

    def __call__(
        self, op: Op, *args: Any, reference: Callable[..., Any] | None = None, **static: Any
    ) -> Any:
        workload = op.workload(*args, **static)
        self.calls[workload] += 1
        inner = Ops({}, {}) if self.chosen(op, *args, **static) else self
        return (reference or op.reference)(inner, *args, **static)


def program_calls(request: ProgramRequest, mesh: Mesh) -> collections.Counter[Workload]:
    """Returns how often one run of a program calls which workload.

    A composite op counts together with the simpler ops that it is looked into for.
    """
    chip = defaults_for(request.plan, mesh.devices.flat[0].device_kind)
    recorder = _Recorder(dict(request.plan.choices), chip)
    call = abstract_call(request, mesh)
    jax.eval_shape(lambda: call(recorder))
    return recorder.calls


def step_workloads(requests: Iterable[ProgramRequest], mesh: Mesh) -> dict[str, Workload]:
    """Returns key -> workload of every op call that the requested programs make."""
    return {w.key: w for request in requests for w in program_calls(request, mesh)}
