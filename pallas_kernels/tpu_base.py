"""What the Mosaic TPU kernels share: VMEM counted in tiles, block shapes that lower, the call.

A TPU core runs the grid of a kernel one step after another; the blocks of a step are copied to and
from VMEM while a neighbouring step computes. On-chip arrays consist of tiles of 8 sublanes by 128
lanes of 32 bits, so a block's last two sizes are whole tiles or the array's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.base import PallasKernel, round_up
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Workload

LANES, SUBLANES = 128, 8
STEP_US = 0.35  # bookkeeping of one grid step (JAX documentation, Pallas TPU pipelining)
RESERVED_BYTES = 2 * 2**20  # VMEM for what the compiler spills and its own scratch

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


def sublanes(dtype: Any) -> int:
    """Rows of one tile: 8 of 32 bits; narrower rows are packed."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def vmem_bytes(*shape: int, dtype: Any) -> int:
    """Bytes of an array in VMEM: its last two axes are padded to whole tiles."""
    *outer, rows, columns = (1, *shape)
    padded = round_up(rows, sublanes(dtype)) * round_up(columns, LANES)
    return math.prod(outer) * padded * jnp.dtype(dtype).itemsize


def row_blocks(rows: int, block: int) -> int:
    """Blocks that `rows` rows take, the last one perhaps in part."""
    return -(-rows // block)


def illegal_rows(rows: int, block: int) -> str | None:
    """Why a block of rows [block, all columns] does not lower, or None."""
    if block != rows and (block >= rows or block % 16):
        return f"blocks of {block} rows are neither all {rows} nor fewer and a multiple of 16"
    return None


def not_bfloat16(workload: Workload, *arrays: str) -> str | None:
    """Names the first of `arrays` that is not bfloat16, or None."""
    dtypes = dict(workload.dtypes)
    for name in arrays:
        if name in dtypes and dtypes[name] != "bfloat16":
            return f"{name} must be bfloat16, not {dtypes[name]}"
    return None


@dataclasses.dataclass(frozen=True)
class MosaicTpuKernel(PallasKernel):
    """A kernel for TPUs. `shared_memory_bytes` is the VMEM it asks the compiler for.

    None is preferred: nothing has been timed on a TPU, so plans take one only where a table or a
    search says so.
    """

    requires: frozenset[str] = frozenset({"mxu", "bf16"})
    platform: str = "tpu"
    memory_name: ClassVar[str] = "VMEM"

    def grid(self, workload: Workload, schedule: Any) -> tuple[int, ...]:
        """Steps along each dimension of the kernel's grid."""
        raise NotImplementedError

    def launch_shape(self, workload: Workload, schedule: Any) -> LaunchShape:
        """One program of the whole core; its blocks follow one another as pipeline steps."""
        moved = self.op.bytes_moved(workload) if self.op.bytes_moved else 0.0
        steps = math.prod(self.grid(workload, schedule))
        flops = self.op.flops(workload) if self.op.flops else 0.0
        in_flight = min(moved, moved / steps * 2)
        return LaunchShape(1, 1, 0, moved, in_flight, steps=steps, flops=flops)

    def params(
        self, workload: Workload, schedule: Any, semantics: Sequence[str]
    ) -> pltpu.CompilerParams:
        """Compiler parameters: dimension semantics, and just the VMEM that was declared."""
        return pltpu.CompilerParams(
            dimension_semantics=tuple(semantics),
            vmem_limit_bytes=self.shared_memory_bytes(workload, schedule),
        )


def sequential(dimensions: int) -> tuple[str, ...]:
    """Semantics of a grid whose steps must keep their order on one core."""
    return ("arbitrary",) * dimensions


def whole(*shape: int) -> pl.BlockSpec:
    """The block of an array that every step sees whole."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def pallas_call(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """pl.pallas_call made when it is called: only then is it known whether to interpret it."""
    return lambda *args: pl.pallas_call(body, **options)(*args)


def in_hbm() -> pl.BlockSpec:
    """An array that stays in HBM; the body copies what it needs."""
    return pl.BlockSpec(memory_space=pl.ANY)


def normalised(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of the rows of x [M,D] as the reference rounds it; weight [1,D]."""
    wide = x.astype(f32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(f32)).astype(x.dtype)
