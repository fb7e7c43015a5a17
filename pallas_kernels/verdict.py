"""Static verdicts on schedules: cheap checks, and lowering for a chip that need not be present.

For a TPU, lowering ends at the kernel's Mosaic module; `tpu_compile.py` goes on to machine code.
"""

from __future__ import annotations

import importlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import CATALOGUE
from pallas_kernels.shapes import NUM_PAGES
from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Kernel, Op, Schedule, Workload

_SPEC = re.compile(r"^(\w+)([?*])?\[([\w,]*)\]$")
_REASON_CHARACTERS = 200  # lowering errors quote whole programs
LOWERED_PER_OP = 32  # legal schedules lowered unless all are
SEED = 0


def workloads(op: Op) -> Iterator[Workload]:
    """Yields the workloads the op's folder declares."""
    return importlib.import_module(f"pallas_kernels.{op.name}.workloads").workloads()


_LOWERING_PLATFORM = {"gpu": "cuda", "tpu": "tpu"}


def kernels_of(op_name: str, platform: str | None = None) -> list[Kernel]:
    """Returns the catalogue's kernels of an op, of one platform if it is named."""
    kernels = [CATALOGUE[name] for name in CATALOGUE if name.split(".")[1] == op_name]
    return [kernel for kernel in kernels if platform in (None, kernel.platform)]


def abstract_arguments(op: Op, workload: Workload, num_pages: int = NUM_PAGES) -> list[Any]:
    """Returns the call's arguments as ShapeDtypeStructs, None for absent ones."""
    sizes = dict(workload.dims) | {"P": num_pages}
    dtypes = dict(workload.dtypes)
    arguments: list[Any] = []
    for spec in op.inputs:
        match = _SPEC.match(spec)
        assert match, f"{op.name}: malformed input spec {spec!r}"
        name, mark, axes = match[1], match[2], [a for a in match[3].split(",") if a]
        if name not in dtypes:
            arguments.append(None)
            continue
        shape = tuple(int(a) if a.isdigit() else sizes[a] for a in axes)
        array = jax.ShapeDtypeStruct(shape, jnp.dtype(dtypes[name]))
        arguments.append(tuple([array] * sizes["L"]) if mark == "*" else array)
    return arguments


def refusal(kernel: Kernel, workload: Workload, schedule: Schedule, chip: ChipSpec) -> str | None:
    """None if the schedule passes the cheap checks, else the reason."""
    try:
        kernel.check(workload, schedule, chip)
    except ScheduleError as error:
        return str(error)
    return None


def lower(kernel: Kernel, workload: Workload, schedule: Schedule, chip: ChipSpec) -> Any:
    """Returns the kernel lowered for `chip` on any host. Raises ScheduleError with the reason."""
    arguments = abstract_arguments(kernel.op, workload)
    kind = chip.kind if chip.platform == "tpu" else chip.name
    device = AbstractDevice(kind, chip.num_sms, chip.platform)
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(kernel.build(workload, schedule)).trace(*arguments)
            return traced.lower(lowering_platforms=(_LOWERING_PLATFORM[chip.platform],))
    except Exception as error:  # whatever Pallas refuses with, it refuses this schedule
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise ScheduleError(f"{kernel.name}: does not lower: {reason}") from error


def judge_op(op_name: str, target: ChipSpec, lower_all: bool) -> dict[str, Any]:
    """Returns counts and reasons over every kernel, workload and schedule of an op.

    The cheap checks see everything; a seeded sample of what passes them is lowered.
    """
    legal: list[tuple[Kernel, Workload, Schedule]] = []
    reasons: Counter[str] = Counter()
    total = 0
    kernels = kernels_of(op_name, target.platform)
    for kernel in kernels:
        for workload in workloads(kernel.op):
            for schedule in kernel.space(workload, target):
                total += 1
                reason = refusal(kernel, workload, schedule, target)
                if reason is None:
                    legal.append((kernel, workload, schedule))
                else:
                    reasons[_general(reason)] += 1
    draw = random.Random(SEED)
    sample = legal if lower_all else draw.sample(legal, min(LOWERED_PER_OP, len(legal)))
    refused = 0
    for kernel, workload, schedule in sample:
        try:
            lower(kernel, workload, schedule, target)
        except ScheduleError as error:
            refused += 1
            reasons[_general(str(error))] += 1
    return {
        "op": op_name,
        "kernels": [kernel.name for kernel in kernels],
        "schedules": total,
        "legal": len(legal),
        "lowered": len(sample) - refused,
        "lowering_sample": len(sample),
        "reasons": dict(reasons.most_common()),
    }


def _general(reason: str) -> str:
    """The reason without its numbers, so that equal ones are counted together."""
    return re.sub(r"(?<![\w.])\d+", "#", reason)
