"""Weight streams on a TPU: a few activation rows times a large matrix read once from HBM.

The grid walks the cores, then blocks of activation rows, then each core's tiles of outputs, then
steps along the depth. Every step multiplies the activations' block by one tile of weights
[groups, outputs, depth]; the tiles after it are copied meanwhile. Activations stay in VMEM whole
and, where the op normalises them, are normalised there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.base import clipped
from pallas_kernels.tpu_base import (
    LANES,
    RESERVED_BYTES,
    STEP_US,
    MosaicTpuKernel,
    bf16,
    f32,
    illegal_rows,
    normalised,
    not_bfloat16,
    pallas_call,
    row_blocks,
    vmem_bytes,
)
from polyjax.core.chips import ChipSpec
from polyjax.core.op import Schedule, Workload, Writes

MAX_ROWS = 1024  # activation rows held at once; longer inputs are taken in blocks
TRANSPOSED = (((1,), (1,)), ((), ()))  # x [M,K] times w [N,K]

Epilogue = Callable[["Position", list[jax.Array]], None]


@dataclasses.dataclass(frozen=True)
class TpuStreamSchedule(Schedule):
    """Sizes of a step, and how tiles are divided.

    `tile_m` activation rows, `tile_n` outputs (or whole groups, where the op's tiles are groups)
    and `tile_k` of the depth make a step; 0 means all of them. `cores` shares of the tiles may run
    on different cores.
    """

    tile_m: int = 0
    tile_n: int = 512
    tile_k: int = 0
    cores: int = 1


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a grid step is: its block of rows, core, tile, and the core's first and last tile."""

    row_block: Any
    core: Any
    tile: Any
    first: Any
    last: Any


@dataclasses.dataclass(frozen=True)
class Stream:
    """The geometry: `rows` activations of `depth` times weights.

    Weights are [groups, outputs, depth] and a tile is `tile_n` outputs of every group; with
    `by_group` they are [tiles * groups, outputs, depth] and a tile is `tile_n` times `groups` of
    them with all their outputs.
    """

    rows: int
    groups: int
    outputs: int
    depth: int
    schedule: TpuStreamSchedule
    normalised: bool = False
    by_group: bool = False
    units: int = 1  # with `by_group`: how many times `groups` there are

    @property
    def tile_m(self) -> int:
        return self.schedule.tile_m or self.rows

    @property
    def tile_k(self) -> int:
        return self.schedule.tile_k or self.depth

    @property
    def tile_n(self) -> int:
        """Outputs of one product."""
        return self.outputs if self.by_group else self.schedule.tile_n or self.outputs

    @property
    def products(self) -> int:
        """Matrix products of a step, [tile_m, tile_n] each."""
        return self.groups * (self.schedule.tile_n or self.units) if self.by_group else self.groups

    @property
    def tiles(self) -> int:
        if self.by_group:
            return self.units // (self.schedule.tile_n or self.units)
        return row_blocks(self.outputs, self.tile_n)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        cores = self.schedule.cores
        blocks, steps = row_blocks(self.rows, self.tile_m), self.depth // self.tile_k
        return cores, blocks, self.tiles // cores, steps

    def tile_of(self, core: Any, turn: Any) -> Any:
        """The tile a core takes at its `turn`: the write maps and the index maps."""
        return core * (self.tiles // self.schedule.cores) + turn

    def illegal(self, chip: ChipSpec) -> str | None:
        s = self.schedule
        if min(s.tile_m, s.tile_n, s.tile_k) < 0 or s.cores < 1:
            return "sizes are 0 (all) or positive, cores at least 1"
        if reason := illegal_rows(self.rows, self.tile_m):
            return reason
        if self.tile_m > MAX_ROWS:
            return f"blocks of {self.tile_m} rows exceed {MAX_ROWS}"
        if self.tile_k != self.depth and (self.tile_k % LANES or self.depth % self.tile_k):
            return f"tile_k={s.tile_k} is no multiple of {LANES} that divides {self.depth}"
        if self.by_group and self.units % (s.tile_n or self.units):
            return f"tile_n={s.tile_n} does not divide {self.units}"
        part = not self.by_group and self.tile_n != self.outputs
        if part and (self.tile_n % LANES or self.tile_n > self.outputs):
            return f"tile_n={s.tile_n} is no multiple of {LANES} within {self.outputs} outputs"
        if s.cores > chip.num_sms:
            return f"cores={s.cores}: {chip.name} has {chip.num_sms}"
        if self.tiles % s.cores:
            return f"{self.tiles} tiles are not shared evenly by {s.cores} cores"
        return None

    def tile_bytes(self) -> int:
        return self.products * vmem_bytes(self.tile_n, self.tile_k, dtype=bf16)

    def vmem_bytes(self) -> int:
        """Both buffers of the weights and activations, what is normalised, sums and their copy."""
        activations = vmem_bytes(self.tile_m, self.depth, dtype=bf16)
        total = 2 * self.tile_bytes() + 2 * activations + RESERVED_BYTES
        sums = self.products * vmem_bytes(self.tile_m, self.tile_n, dtype=f32)
        total += sums * (1 + (self.grid[-1] > 1))
        if self.normalised:
            wide = vmem_bytes(self.tile_m, self.depth, dtype=f32)
            total += activations + 2 * wide + 2 * vmem_bytes(1, self.depth, dtype=bf16)
        return total

    def predicted_us(self, chip: ChipSpec) -> float:
        """Bytes of all tiles at full bandwidth, each core's first tile in the open, and steps."""
        _, blocks, turns, steps = self.grid
        tile = self.tile_bytes()
        share = chip.hbm_bytes_per_s / chip.num_sms * 1e-6  # bytes a core moves in a microsecond
        per_core = blocks * turns * steps
        return (per_core + 1) * tile / share + per_core * STEP_US

    # -- the call ----------------------------------------------------------------------------

    def row_spec(self, columns: int) -> pl.BlockSpec:
        """Block of an array [rows, columns] that follows the rows alone."""
        return pl.BlockSpec((self.tile_m, columns), lambda c, i, t, k: (i, 0))

    def tile_spec(self, rows: int | None = None) -> pl.BlockSpec:
        """Block of an array [rows, outputs]; of one row ([1, outputs]) with `rows=1`."""
        tile = self.tile_of
        if rows == 1:
            return pl.BlockSpec((1, self.tile_n), lambda c, i, t, k: (0, tile(c, t)))
        return pl.BlockSpec((self.tile_m, self.tile_n), lambda c, i, t, k: (i, tile(c, t)))

    def group_spec(self, *shape: int, rows_at: int | None = None) -> pl.BlockSpec:
        """Block of an array whose first axis follows the tile, and axis `rows_at` the rows."""

        def index(c: Any, i: Any, t: Any, k: Any) -> tuple[Any, ...]:
            return tuple(
                self.tile_of(c, t) if axis == 0 else i if axis == rows_at else 0
                for axis in range(len(shape))
            )

        return pl.BlockSpec(shape, index)

    def _weight_spec(self) -> pl.BlockSpec:
        tile, shape = self.tile_of, (self.products, self.tile_n, self.tile_k)
        if self.by_group:
            return pl.BlockSpec(shape, lambda c, i, t, k: (tile(c, t), 0, k))
        return pl.BlockSpec(shape, lambda c, i, t, k: (0, tile(c, t), k))

    def call(
        self,
        body: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Epilogue],
        params: pltpu.CompilerParams,
        name: str,
        extra: Sequence[pl.BlockSpec],
        out_specs: Sequence[pl.BlockSpec],
        out_shape: Sequence[jax.ShapeDtypeStruct],
        scratch: Sequence[Any] = (),
        eps: float = 0.0,
    ) -> Callable[..., Any]:
        """Returns f(x [M,D], [norm [1,D]], w, *extra arrays) -> outputs.

        `body(extra refs, output refs, scratch refs)` gives the epilogue, which gets the float32
        sums [tile_m, tile_n] of a tile, one a product, when they are complete.
        """
        steps = self.grid[-1]
        own = [pltpu.VMEM((self.tile_m, self.depth), bf16)] if self.normalised else []
        if steps > 1:
            own.append(pltpu.VMEM((self.products, self.tile_m, self.tile_n), f32))

        def kernel(*refs: Any) -> None:
            queue = list(refs)
            x_ref = queue.pop(0)
            norm_ref = queue.pop(0) if self.normalised else None
            w_ref = queue.pop(0)
            extras, outputs = queue[: len(extra)], queue[len(extra) : len(extra) + len(out_specs)]
            rest = queue[len(extra) + len(out_specs) :]
            y_ref = rest.pop(0) if self.normalised else x_ref
            sums_ref = rest.pop(0) if steps > 1 else None
            epilogue = body(extras, outputs, rest)
            self._step(x_ref, norm_ref, w_ref, y_ref, sums_ref, epilogue, eps)

        norm = [pl.BlockSpec((1, self.depth), lambda c, i, t, k: (0, 0))] if self.normalised else []
        return pallas_call(
            kernel,
            grid=self.grid,
            in_specs=[self.row_spec(self.depth), *norm, self._weight_spec(), *extra],
            out_specs=list(out_specs),
            out_shape=list(out_shape),
            scratch_shapes=[*own, *scratch],
            compiler_params=params,
            name=name,
        )

    def _step(
        self,
        x_ref: Any,
        norm_ref: Any,
        w_ref: Any,
        y_ref: Any,
        sums_ref: Any,
        epilogue: Epilogue,
        eps: float,
    ) -> None:
        _, _, turns, steps = self.grid
        core, i, turn, k = (pl.program_id(axis) for axis in range(4))
        where = Position(i, core, self.tile_of(core, turn), turn == 0, turn == turns - 1)
        if norm_ref is not None:

            @pl.when(jnp.logical_and(turn == 0, k == 0))
            def _normalise() -> None:
                y_ref[...] = normalised(x_ref[...], norm_ref[...], eps)

        if steps == 1:
            y = y_ref[...]
            epilogue(where, [self._product(y, w_ref[g]) for g in range(self.products)])
            return
        y = y_ref[:, pl.ds(pl.multiple_of(k * self.tile_k, LANES), self.tile_k)]
        for g in range(self.products):
            part = self._product(y, w_ref[g])
            sums_ref[g] = jnp.where(k == 0, part, sums_ref[g] + part)

        @pl.when(k == steps - 1)
        def _finish() -> None:
            epilogue(where, [sums_ref[g] for g in range(self.products)])

    def _product(self, y: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(y, w, TRANSPOSED, preferred_element_type=f32)


SEMANTICS = ("parallel", "arbitrary", "arbitrary", "arbitrary")


@dataclasses.dataclass(frozen=True)
class TpuStreamKernel(MosaicTpuKernel):
    """A kernel whose body is a weight stream. A subclass gives `stream` and what its op adds."""

    schedule_type: ClassVar[type[TpuStreamSchedule]] = TpuStreamSchedule
    tiles_n: ClassVar[tuple[int, ...]] = (128, 256, 384, 512, 768, 1024, 2048, 4096, 0)

    def stream(self, workload: Workload, schedule: TpuStreamSchedule) -> Stream:
        """The geometry of the product."""
        raise NotImplementedError

    def extra_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        """VMEM of what the op adds: both buffers of its blocks, its scratch, its temporaries."""
        raise NotImplementedError

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[TpuStreamSchedule]:
        for tile_m in (0, 16, 64, 128, 256):
            for tile_n in self.tiles_n:
                for tile_k in (0, 512, 1024, 2048, 4096):
                    for cores in (1, 2):
                        yield TpuStreamSchedule(tile_m, tile_n, tile_k, cores)

    def rank(
        self, workload: Workload, schedule: TpuStreamSchedule, chip: ChipSpec
    ) -> tuple[Any, ...]:
        """Least predicted time; of equals the one that takes less VMEM."""
        stream = self.stream(workload, schedule)
        return -stream.predicted_us(chip), -self.shared_memory_bytes(workload, schedule)

    def family(self, schedule: TpuStreamSchedule) -> tuple[Any, ...]:
        return schedule.tile_n, schedule.tile_k

    def illegal(
        self, workload: Workload, schedule: TpuStreamSchedule, chip: ChipSpec
    ) -> str | None:
        return self.stream(workload, schedule).illegal(chip)

    def shared_memory_bytes(self, workload: Workload, schedule: TpuStreamSchedule) -> int:
        stream = self.stream(workload, schedule)
        return stream.vmem_bytes() + self.extra_bytes(workload, schedule)

    def outputs(
        self, workload: Workload, schedule: TpuStreamSchedule
    ) -> tuple[tuple[int, ...], ...]:
        """One array [rows, outputs], unless the op says otherwise."""
        stream = self.stream(workload, schedule)
        return ((stream.rows, stream.outputs),)

    def writes(self, workload: Workload, schedule: TpuStreamSchedule) -> Iterator[Writes]:
        stream = self.stream(workload, schedule)
        for start in tile_writes(stream):
            yield clipped((stream.rows, stream.outputs), start, (stream.tile_m, stream.tile_n))

    def writing(self, schedule: TpuStreamSchedule) -> Any:
        return schedule.tile_m, schedule.tile_n, schedule.cores

    def grid(self, workload: Workload, schedule: TpuStreamSchedule) -> tuple[int, ...]:
        return self.stream(workload, schedule).grid

    def stream_params(
        self, workload: Workload, schedule: TpuStreamSchedule
    ) -> pltpu.CompilerParams:
        return self.params(workload, schedule, SEMANTICS)


def unsupported(workload: Workload, depth: int, *arrays: str) -> str | None:
    """Why a weight stream cannot take these arrays, or None."""
    if reason := not_bfloat16(workload, *arrays):
        return reason
    return None if depth % 8 == 0 else f"a depth of {depth} is no multiple of 8"


def tile_writes(stream: Stream, output: int = 0) -> Iterator[tuple[int, int]]:
    """First row and first output of every tile that a stream finishes."""
    cores, blocks, turns, _ = stream.grid
    for i in range(blocks):
        for core in range(cores):
            for turn in range(turns):
                yield i * stream.tile_m, stream.tile_of(core, turn) * stream.tile_n
