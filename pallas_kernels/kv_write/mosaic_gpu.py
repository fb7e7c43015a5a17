"""Writes new keys and values to their slots of the paged pool, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.row_kernel import HALF_ROWS, VECTOR, RowKernel, RowSchedule
from polyjax.core.op import Workload, Writes
from polyjax.core.ops import KV_WRITE


def new_row(row: Any, side: int, head: Any) -> tuple[Any, int, Any, int]:
    """A block's place among the new rows [M,2,K,H]: the write map and the body's stores."""
    return row, side, head, 0


@dataclasses.dataclass(frozen=True)
class SlotWrite(RowKernel):
    def supports(self, workload: Workload) -> str | None:
        for name in ("kv", "k", "v"):
            if workload.dtype(name) != jnp.bfloat16:
                return f"{name} must be bfloat16, not {workload.dtype(name)}"
        return None if workload["H"] % HALF_ROWS == 0 else f"head dim {workload['H']} % 64"

    def outputs(self, workload: Workload, schedule: RowSchedule) -> tuple[tuple[int, ...], ...]:
        """The new rows [M,2,K,H] that go to the pool's slots."""
        return ((workload["M"], 2, workload["K"], workload["H"]),)

    def writes(self, workload: Workload, schedule: RowSchedule) -> Iterator[Writes]:
        for row in range(workload["M"]):
            for head in range(workload["K"]):
                for side in range(2):
                    yield Writes(0, new_row(row, side, head), (1, 1, 1, workload["H"]))

    def build(self, workload: Workload, schedule: RowSchedule) -> Callable[..., Any]:
        page_size, dim = workload["Z"], workload["H"]

        def body(k_g: Any, v_g: Any, slots_g: Any, pool_g: Any) -> None:
            schedule.wait()
            row, _, head, _ = new_row(jax.lax.axis_index("row"), 0, jax.lax.axis_index("head"))
            slot = slots_g[row]
            page, offset = slot // page_size, jax.lax.rem(slot, page_size)
            for side, source_g in enumerate((k_g, v_g)):
                for start in range(0, dim, HALF_ROWS):
                    part = pl.ds(start, HALF_ROWS)
                    source = source_g.at[row, head, part]
                    value = plgpu.load(source, layout=VECTOR, optimized=False)
                    pool_g.at[page, side, head, offset, part][...] = value

        kernel = plgpu.kernel(
            body,
            grid=(workload["K"], workload["M"]),
            grid_names=("head", "row"),
            kernel_name="kv_write",
        )

        def kv_write(kv: Any, k: Any, v: Any, slots: Any) -> jax.Array:
            pool = jax.new_ref(kv)
            kernel(k, v, slots, pool)
            return jax.freeze(pool)

        return kv_write


KERNEL = SlotWrite("mosaic_gpu.kv_write.slot", KV_WRITE)
