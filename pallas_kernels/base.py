"""What every kernel of this package shares: legality checks and write-map coverage.

A kernel module describes one implementation as a frozen `MosaicGpuKernel` or `MosaicTpuKernel`
(tpu_base.py). The cheap static verdict lives here: chip features by name, on-chip memory,
kernel-specific divisibility, and exact coverage of the declared write map.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Op, Schedule, Workload, Writes

WARPGROUP_THREADS = 128
MMA_ROWS = 64  # rows of A in one wgmma: m64nNk16 (PTX ISA, wgmma.mma_async)
SWIZZLE_BYTES = 128
REGISTERS_PER_THREAD = 255  # ptxas limit of one thread
BARRIER_BYTES = 8

f32 = jnp.float32


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def shared_array_bytes(*shape: int, itemsize: int) -> int:
    """Bytes one SMEM scratch array occupies: Mosaic GPU aligns each allocation to 1024 bytes."""
    return round_up(math.prod(shape) * itemsize, 1024)


def clipped(
    shape: tuple[int, ...], starts: Iterable[int], sizes: Iterable[int], output: int = 0
) -> Writes:
    """The part of a block that lies inside the output: the copy engine drops what lies outside."""
    starts = tuple(starts)
    kept = tuple(min(size, n - start) for start, size, n in zip(starts, sizes, shape, strict=True))
    return Writes(output, starts, kept)


def uncovered(writes: Iterable[Writes], shapes: tuple[tuple[int, ...], ...]) -> str | None:
    """None if the blocks cover every element of every output exactly once, else what is wrong."""
    blocks: dict[int, list[Writes]] = {i: [] for i in range(len(shapes))}
    for block in writes:
        blocks[block.output].append(block)
    for output, shape in enumerate(shapes):
        reason = _uncovered_output(blocks[output], shape)
        if reason:
            return f"output {output}: {reason}"
    return None


def _uncovered_output(blocks: list[Writes], shape: tuple[int, ...]) -> str | None:
    if not blocks:
        return "no block writes it"
    starts = np.array([b.starts for b in blocks])
    ends = starts + np.array([b.sizes for b in blocks])
    if (starts < 0).any() or (ends > np.array(shape)).any():
        return f"a block leaves the bounds {shape}"
    # Blocks are boxes: count on the grid of all box edges instead of on every element.
    edges = [
        np.unique(np.concatenate([[0, n], starts[:, i], ends[:, i]])) for i, n in enumerate(shape)
    ]
    delta = np.zeros([len(e) for e in edges], np.int64)
    corners = [
        (np.searchsorted(e, starts[:, i]), np.searchsorted(e, ends[:, i]))
        for i, e in enumerate(edges)
    ]
    for corner in itertools.product((0, 1), repeat=len(shape)):
        np.add.at(delta, tuple(corners[i][c] for i, c in enumerate(corner)), (-1) ** sum(corner))
    count = functools.reduce(np.cumsum, range(len(shape)), delta)
    count = count[tuple(slice(0, -1) for _ in shape)]
    if (count == 0).any():
        return "elements that no block writes"
    return "elements that more than one block writes" if (count > 1).any() else None


@dataclasses.dataclass(frozen=True)
class PallasKernel:
    """Base of the kernels in the catalogue; satisfies `polyjax.core.op.Kernel` once completed.

    A subclass gives `supports`, `space`, `rank`, `shared_memory_bytes`, `outputs`, `writes`,
    `launch_shape`, `build` and, where it has rules of its own, `illegal` and `default`.
    """

    name: str
    op: Op
    requires: frozenset[str]
    platform: str
    schedule_type: ClassVar[type[Schedule]]
    memory_name: ClassVar[str] = "shared memory"

    def supports(self, workload: Workload) -> str | None:
        raise NotImplementedError

    def preferred(self, workload: Workload) -> bool:
        """False: chosen only where a table says so. Kernels that beat XLA on a device say more."""
        return False

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[Any]:
        raise NotImplementedError

    def default(self, workload: Workload, chip: ChipSpec) -> Any:
        """The legal schedule that ranks highest; where none is legal, one `check` refuses."""
        legal = [s for s in self.space(workload, chip) if self.fits(workload, s, chip)]
        if not legal:
            return self.schedule_type()
        return max(legal, key=lambda s: self.rank(workload, s, chip))

    def fits(self, workload: Workload, schedule: Any, chip: ChipSpec) -> bool:
        """Whether the kernel's own rules and the chip's memory allow a schedule."""
        if self.illegal(workload, schedule, chip):
            return False
        return self.shared_memory_bytes(workload, schedule) <= chip.shared_memory_bytes

    def rank(self, workload: Workload, schedule: Any, chip: ChipSpec) -> tuple[Any, ...]:
        """How promising the analytical model finds a legal schedule; higher is better."""
        return ()

    def family(self, schedule: Any) -> tuple[Any, ...]:
        """The knobs that divide the work differently; a sweep tries each family before variants."""
        return ()

    def shared_memory_bytes(self, workload: Workload, schedule: Any) -> int:
        raise NotImplementedError

    def outputs(self, workload: Workload, schedule: Any) -> tuple[tuple[int, ...], ...]:
        """Shapes that `writes` covers, one per output (a pool written in place: its new rows)."""
        raise NotImplementedError

    def writes(self, workload: Workload, schedule: Any) -> Iterator[Writes]:
        raise NotImplementedError

    def writing(self, schedule: Any) -> Any:
        """The part of a schedule that `writes` and `outputs` depend on; hashable."""
        return schedule

    def launch_shape(self, workload: Workload, schedule: Any) -> LaunchShape:
        raise NotImplementedError

    def illegal(self, workload: Workload, schedule: Any, chip: ChipSpec) -> str | None:
        """Kernel-specific rules: None, or the reason the schedule cannot work."""
        return None

    def plain(self, schedule: Any) -> Any:
        """The schedule with knobs that interpret mode lacks replaced by their plain paths."""
        return schedule

    def build(self, workload: Workload, schedule: Any) -> Callable[..., Any]:
        raise NotImplementedError

    def check(self, workload: Workload, schedule: Any, chip: ChipSpec) -> None:
        """Raises ScheduleError with the first reason found, cheapest checks first."""
        missing = sorted(self.requires - chip.features)
        if missing:
            raise ScheduleError(f"{self.name} needs {', '.join(missing)}, which {chip.name} lacks")
        reason = self.supports(workload) or self.illegal(workload, schedule, chip)
        if reason:
            raise ScheduleError(f"{self.name}: {reason}")
        needed = self.shared_memory_bytes(workload, schedule)
        if needed > chip.shared_memory_bytes:
            raise ScheduleError(
                f"{self.name}: {needed} bytes of {self.memory_name}, "
                f"{chip.name} has {chip.shared_memory_bytes}"
            )
        reason = _write_map_fault(self, workload, _Writing(self.writing(schedule), schedule))
        if reason:
            raise ScheduleError(f"{self.name}: write map: {reason}")


@dataclasses.dataclass(frozen=True)
class MosaicGpuKernel(PallasKernel):
    """A kernel for NVIDIA GPUs."""

    platform: str = "gpu"

    def launch_shape(self, workload: Workload, schedule: Any) -> LaunchShape:
        """One block of one warpgroup a declared write, all of its loads asked for at once."""
        blocks = sum(1 for _ in self.writes(workload, schedule))
        moved = self.op.bytes_moved(workload) if self.op.bytes_moved else 0.0
        return LaunchShape(blocks, WARPGROUP_THREADS, 64, moved, moved / blocks)


@dataclasses.dataclass(frozen=True)
class _Writing:
    """Schedules that write alike are equal: one coverage check serves them all."""

    key: Any
    schedule: Any = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4096)
def _write_map_fault(kernel: PallasKernel, workload: Workload, writing: _Writing) -> str | None:
    schedule = writing.schedule
    return uncovered(kernel.writes(workload, schedule), kernel.outputs(workload, schedule))
