"""The op-level equivalence gate: results agree with the float32 reference within derived bounds.

Every case of the candidate's workload, then cases of other sizes and of float32, so that knowing
the size that is checked does not help. Freed memory is filled with NaN first: an output element
that is never written cannot show yesterday's right answer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyjax.core.op import REFERENCE, Workload
from polyjax.gates.inputs import Case
from polyjax.gates.trial import OpTrial

GATE = "op_equivalence"


def check(trial: OpTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure."""
    worst: dict[str, float] = {}
    count = 0
    for workload in trial.workloads():
        for index, case in enumerate(trial.cases(workload)):
            if index == 0:
                _poison_free_memory(case)
            ratio = trial.judge_known(workload, index)
            worst[_dtype_name(workload)] = max(worst.get(_dtype_name(workload), 0.0), ratio)
            count += 1
    return {"cases": count, "worst_error_over_bound": worst}


def _dtype_name(workload: Workload) -> str:
    return next(iter(dict(workload.dtypes).values()))


def _poison_free_memory(case: Case) -> None:
    """Leaves NaN in blocks of the outputs' sizes for the allocator to hand out again."""
    static = case.static
    shapes = jax.eval_shape(lambda *args: REFERENCE(case.op, *args, **static), *case.args)
    for leaf in jax.tree.leaves(shapes):
        poison = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo(leaf.dtype).max
        for block in [jax.device_put(jnp.full(leaf.shape, poison, leaf.dtype)) for _ in range(2)]:
            block.block_until_ready().delete()
