"""A kernel of plain jnp that runs where tests do: right, wrong or failing, as its schedule says."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from polyjax.core.op import Schedule
from polyjax.core.ops import MATMUL


@dataclasses.dataclass(frozen=True)
class ToySchedule(Schedule):
    kind: str = "right"


class ToyMatmul:
    name = "tests.search.toy_kernel:KERNEL"
    op = MATMUL
    schedule_type = ToySchedule

    def build(self, workload, schedule):
        def matmul(x, w, bias=None, residual=None):
            if schedule.kind == "broken":
                raise ValueError("this schedule does not compile")
            y = x.astype(jnp.float32) @ w.astype(jnp.float32).T
            return (y + (schedule.kind == "wrong")).astype(x.dtype)

        return matmul


KERNEL = ToyMatmul()
