"""Base of the kernels built on a weight stream: their schedule space, default and legality."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.base import MMA_ROWS, MosaicGpuKernel
from pallas_kernels.weight_stream import Stream, StreamSchedule
from polyjax.core import reference
from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Workload

REQUIRES = frozenset({"tma", "wgmma", "cluster", "bf16"})
STAGED_BYTES = 192 * 1024  # ring size beyond which more stages change nothing (227 KiB a block)


@dataclasses.dataclass(frozen=True)
class StreamKernel(MosaicGpuKernel):
    """A kernel whose body is `Stream.run`. A subclass gives `stream` and what its op adds."""

    requires: frozenset[str] = REQUIRES
    schedule_type: ClassVar[type[StreamSchedule]] = StreamSchedule
    max_split: ClassVar[int] = 8
    tile_rows: ClassVar[tuple[int, ...]] = (MMA_ROWS,)
    norms: ClassVar[tuple[bool, ...]] = (
        False,
    )  # values of separate_norm; (False, True) with a norm

    def stream(self, workload: Workload, schedule: StreamSchedule) -> Stream:
        """The geometry of the product."""
        raise NotImplementedError

    def extra_bytes(self, workload: Workload, schedule: StreamSchedule) -> int:
        """Shared memory of the epilogue beyond one output and one residual tile."""
        return 0

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[StreamSchedule]:
        """The grid of knobs. Blocks: one per tile, or what fills the chip one to three times."""
        variants = itertools.product(self.tile_rows, self.norms)
        for tile_rows, separate_norm in variants:
            shape = StreamSchedule(tile_rows=tile_rows, separate_norm=separate_norm)
            yield from self._space(workload, chip, shape)

    def _space(
        self, workload: Workload, chip: ChipSpec, shape: StreamSchedule
    ) -> Iterator[StreamSchedule]:
        probe = self.stream(workload, shape)
        for tile_k in (64, 128, 256):
            for stages in (2, 3, 4, 6, 8, 12):
                for split_k in (s for s in (1, 2, 4, 8) if s <= self.max_split):
                    once = max(1, chip.num_sms // split_k // 2 * 2)
                    counts = (min(probe.tiles, n) for n in (probe.tiles, once, 2 * once, 3 * once))
                    for blocks in dict.fromkeys(counts):
                        for resident in (True, False):
                            for dependent in (False, True):
                                yield dataclasses.replace(
                                    shape,
                                    tile_k=tile_k,
                                    stages=stages,
                                    split_k=split_k,
                                    blocks=blocks,
                                    resident=resident,
                                    dependent_launch=dependent,
                                )

    def default(self, workload: Workload, chip: ChipSpec) -> StreamSchedule:
        """Splits K until most SMs have a block, then the deepest ring that fits.

        Measured on an H200: tiles of 256 columns, one tile a block and streamed activations win
        wherever they are legal; several tiles in one cluster lose (the reduction is exposed).
        """
        legal = [s for s in self.space(workload, chip) if self.fits(workload, s, chip)]
        if not legal:  # `check` names the reason
            return StreamSchedule(64, 2, 1, 1)
        return max(legal, key=lambda s: self.rank(workload, s, chip))

    def rank(self, workload: Workload, schedule: StreamSchedule, chip: ChipSpec) -> tuple[Any, ...]:
        s, stream = schedule, self.stream(workload, schedule)
        exposed = s.split_k > 1 and stream.tiles > s.blocks
        repeated = s.blocks > 3 * chip.num_sms  # every block fills its ring and loads x anew
        ring = min(STAGED_BYTES, s.stages * s.tile_k * 128 * stream.groups)
        return (
            s.blocks * s.split_k > 0.75 * chip.num_sms,
            not exposed,
            not repeated,
            not s.dependent_launch,
            -s.split_k,
            ring,
            (s.tile_rows > MMA_ROWS) == (workload["M"] > 16),
            s.separate_norm == (workload["M"] > 16),
            s.resident == (workload["M"] <= 8),
            s.tile_k,
        )

    def family(self, schedule: StreamSchedule) -> tuple[Any, ...]:
        return schedule.split_k, schedule.tile_rows, schedule.separate_norm

    def illegal(self, workload: Workload, schedule: StreamSchedule, chip: ChipSpec) -> str | None:
        if schedule.tile_rows not in self.tile_rows:
            return f"tile_rows={schedule.tile_rows} is none of {self.tile_rows}"
        if schedule.separate_norm not in self.norms:
            return "separate_norm: this op has no norm"
        if schedule.split_k > self.max_split:
            return (
                f"split_k={schedule.split_k} exceeds {self.max_split}, the most this kernel splits"
            )
        return self.stream(workload, schedule).illegal(chip)

    def shared_memory_bytes(self, workload: Workload, schedule: StreamSchedule) -> int:
        stream = self.stream(workload, schedule)
        return stream.shared_memory_bytes() + self.extra_bytes(workload, schedule)

    def launch_shape(self, workload: Workload, schedule: StreamSchedule) -> LaunchShape:
        shape = self.stream(workload, schedule).launch_shape()
        return dataclasses.replace(shape, kernels=1 + schedule.separate_norm)

    def writing(self, schedule: StreamSchedule) -> Any:
        return schedule.tile_rows

    def plain(self, schedule: StreamSchedule) -> StreamSchedule:
        return dataclasses.replace(schedule, reduction="serial", dependent_launch=False)


def with_norm(
    kernel: Callable[..., Any], schedule: StreamSchedule, eps: float
) -> Callable[..., Any]:
    """The op's signature f(x, norm, *rest): the norm's weight reaches a kernel that applies it."""

    def call(x: jax.Array, norm: jax.Array, *rest: Any) -> Any:
        if schedule.separate_norm:
            return kernel(reference.rms_norm(None, x, norm, eps=eps), *rest)
        return kernel(x, norm, *rest)

    return call


def unsupported(
    workload: Workload, rows: int, depth: int, *arrays: str, groups: int = 1
) -> str | None:
    """Why a weight stream cannot take these activations and weights, or None."""
    for name in arrays:
        if workload.dtype(name) != jnp.bfloat16:
            return f"{name} must be bfloat16, not {workload.dtype(name)}"
    if rows > 256 // groups:
        return f"M={rows} exceeds {256 // groups} rows: the accumulators leave no registers"
    if rows > 8 and rows % 8:
        return f"M={rows} is neither less than 8 nor a multiple of it (rows of a TMA tile)"
    return None if depth % 64 == 0 else f"the reduction length {depth} is no multiple of 64"
