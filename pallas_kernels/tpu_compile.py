"""Kernels compiled ahead of time for TPUs that are not there, through libtpu's topologies.

Needs libtpu, which belongs into an environment of its own; scripts/check_tpu makes one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import random
import time
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.verdict import abstract_arguments, kernels_of, refusal, workloads
from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError
from polyjax.core.op import Kernel, Schedule, Workload

# Smallest topology of each chip by name: a host's worth (Google Cloud TPU documentation).
TOPOLOGIES = {"TPU v5e": "v5e:2x2", "TPU v5p": "v5p:2x2x1", "TPU v6e": "v6e:2x2"}
DONATED = {"kv_write": (0,), "norm_qkv_rope_write": (7,)}  # pools, which kernels write in place
_REASON_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of one schedule: `reason` is None if the TPU compiler took it."""

    chip: str
    kernel: str
    workload: str
    schedule: dict[str, Any]
    reason: str | None
    compile_s: float
    code_bytes: int
    temp_bytes: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.chip, self.kernel, self.workload, str(sorted(self.schedule.items()))


@functools.cache
def topology(chip_name: str) -> topologies.TopologyDescription:
    """Devices of a chip to compile for. Raises ConfigError without libtpu or for another chip."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("libtpu is not installed: scripts/check_tpu makes an environment with it")
    if chip_name not in TOPOLOGIES:
        raise ConfigError(f"no topology of {chip_name}; known: {', '.join(TOPOLOGIES)}")
    return topologies.get_topology_desc(TOPOLOGIES[chip_name], platform="tpu")


def sample(
    op_name: str, target: ChipSpec, count: int, seed: int
) -> list[tuple[Kernel, Workload, Schedule]]:
    """Legal schedules of an op for a chip, the same for the same seed; defaults come first."""
    draw = random.Random(f"{seed} {op_name} {target.name}")
    cases = [
        (kernel, workload)
        for kernel in kernels_of(op_name, target.platform)
        for workload in workloads(kernel.op)
        if kernel.supports(workload) is None
    ]
    drawn: dict[tuple[str, str, str], tuple[Kernel, Workload, Schedule]] = {}
    for turn in range(4 * count):
        if len(drawn) == count:
            break
        kernel, workload = draw.choice(cases)
        legal = [
            s for s in kernel.space(workload, target) if not refusal(kernel, workload, s, target)
        ]
        if not legal:
            continue
        schedule = (
            draw.choice(legal) if turn >= max(1, count // 4) else kernel.default(workload, target)
        )
        drawn.setdefault((kernel.name, workload.key, str(schedule)), (kernel, workload, schedule))
    return list(drawn.values())


def compile_schedule(
    kernel: Kernel, workload: Workload, schedule: Schedule, target: ChipSpec
) -> Compiled:
    """Compiles one kernel to machine code; a refusal is a result."""
    sharding = SingleDeviceSharding(topology(target.name).devices[0])
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        abstract_arguments(kernel.op, workload),
    )
    donated = DONATED.get(kernel.op.name, ())
    started = time.perf_counter()
    reason, code, temp = None, 0, 0
    try:
        jitted = jax.jit(kernel.build(workload, schedule), donate_argnums=donated)
        memory = jitted.trace(*arguments).lower().compile().memory_analysis()
        code, temp = memory.generated_code_size_in_bytes, memory.temp_size_in_bytes
    except Exception as error:  # whatever the compiler refuses with, it refuses this schedule
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS]
    seconds = round(time.perf_counter() - started, 3)
    fields = schedule.to_json()
    return Compiled(target.name, kernel.name, workload.key, fields, reason, seconds, code, temp)
