"""Base of the small kernels that take one row of activations a block through registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.base import WARPGROUP_THREADS, MosaicGpuKernel
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Schedule, Workload

HALF_ROWS = 64  # length of a vector in the layout of one value per accumulator row
VECTOR = plgpu.Layout.WGMMA.reduce(1)  # 64 values, each held by four lanes
REDUCTION_SCRATCH_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class RowSchedule(Schedule):
    """`dependent_launch` lets a block start before the previous kernel ends."""

    dependent_launch: bool = False

    def wait(self) -> None:
        """Inside a kernel: waits for the results of the kernel before."""
        if self.dependent_launch:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()


@dataclasses.dataclass(frozen=True)
class RowKernel(MosaicGpuKernel):
    requires: frozenset[str] = frozenset({"bf16"})
    schedule_type: ClassVar[type[RowSchedule]] = RowSchedule

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[RowSchedule]:
        yield RowSchedule(False)
        yield RowSchedule(True)

    def default(self, workload: Workload, chip: ChipSpec) -> RowSchedule:
        return RowSchedule()

    def writing(self, schedule: RowSchedule) -> Any:
        return ()

    def plain(self, schedule: RowSchedule) -> RowSchedule:
        return RowSchedule()

    def shared_memory_bytes(self, workload: Workload, schedule: RowSchedule) -> int:
        return REDUCTION_SCRATCH_BYTES


def strided(length: int) -> Any:
    """Layout of a vector over a warpgroup with the widest loads its length allows."""
    vector = next(v for v in (8, 4, 2, 1) if length % (WARPGROUP_THREADS * v) == 0)
    return plgpu.Layout.WG_STRIDED((length,), vector)


def unsupported_row(workload: Workload, length: int, *arrays: str) -> str | None:
    for name in arrays:
        if workload.dtype(name) != jnp.bfloat16:
            return f"{name} must be bfloat16, not {workload.dtype(name)}"
    if length % WARPGROUP_THREADS or length > 128 * WARPGROUP_THREADS:
        return f"a row of {length} is no multiple of {WARPGROUP_THREADS} of at most 16384"
    return None
